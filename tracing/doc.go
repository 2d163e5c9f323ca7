// Package tracing shows what a proxy does as OpenTelemetry traces: one trace for
// each sync of an IP family, with a span for each of its stages.
//
//	sync                    from the arrival of the oldest change to the end
//	├ queued                it waits for the rate limit, or for a sync that runs
//	├ tracker               what arrived becomes a state and what differs
//	├ resolve               what that means for packets
//	├ plan                  what the kernel needs
//	├ apply                 the kernel takes it
//	├ conntrack             stale flows are forgotten
//	└ health                health check node ports are told
//
// With an engine that takes part in connections itself, such as userspace, there is
// one trace too for each TCP connection, and for each flow of a UDP client.
//
//	connection              from its arrival to its end
//	├ held                  it waits for endpoints
//	├ dial                  one attempt to reach an endpoint; there may be several
//	└ proxied               bytes go back and forth
//
// The spans are made when a sync or a connection has ended, from its report: a proxy
// without tracing does nothing for it. Of thousands of connections a second, let the
// TracerProvider sample some; the example shows how to keep all that went wrong.
// The package builds everywhere, and is the only one that needs OpenTelemetry.
package tracing
