// Package tracing records syncs and connections as OpenTelemetry traces. It is for programs with a
// TracerProvider of OpenTelemetry. There is one trace for each sync of an IP family, with a span
// for each stage:
//
//	sync                    from the arrival of the oldest change to the end
//	├ queued                waits for the rate limit, or for the previous sync
//	├ tracker               merges the changes into a new State and a Delta
//	├ resolve               decides what the changes mean for packets
//	├ plan                  computes the kernel objects
//	├ apply                 writes them
//	├ conntrack             deletes stale flows
//	└ health                updates health check node ports
//
// The userspace engine also reports connections. There is one trace for each TCP
// connection, and for each flow of a UDP client:
//
//	connection              from its arrival to its end
//	├ held                  waits for endpoints
//	├ dial                  one attempt to connect to an endpoint; there may be several
//	└ proxied               copies bytes in both directions
//
// The spans are created from the report of a sync or a connection after its end, so a
// proxy without tracing has no cost. With thousands of connections per second, let the
// TracerProvider sample them; the example shows how to keep all that failed.
package tracing
