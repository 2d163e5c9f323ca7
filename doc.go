// Package serviceplane is a library of Kubernetes Service proxy engines: what
// kube-proxy does on a node, for programs that import it. It has no names of its own;
// this page leads to the packages that do. What programs a kernel works on Linux, all
// else builds everywhere.
//
// # Two ways in
//
// A program that wants Services to work takes an engine and feeds it with events. Call
// New of package nftables, iptables, ipvs or userspace. It returns a
// [github.com/serviceplane/serviceplane/proxier.Proxier], which has the handlers that
// informers call, Run, Sync, Status, Explain and Cleanup.
//
// A program with a data plane of its own takes the change trackers of package
// changetracker: an immutable State for each IP family, and a Delta that is consumed
// only when the program says so. Package desired tells what each Service means for
// packets. The next step is to implement
// [github.com/serviceplane/serviceplane/proxier.Engine]; then rate limits, retries,
// health and metrics come from package proxier.
//
// # Packages
//
// To decide, without a kernel:
//   - changetracker: Services and EndpointSlices to State and Delta.
//   - desired: frontends, endpoints, session affinity, source ranges and masquerade of
//     each Service port.
//   - runner: runs a function with a rate limit, retries and backoff.
//   - proxier: Provider, Engine, Config and Status, and the driver of all engines.
//
// To program a node:
//   - nftables, iptables, ipvs, userspace: the engines.
//   - userspace/connection: what the last of these reports of each connection.
//   - hybrid: one engine of several, with one of them for each Service.
//   - conntrack: deletes the conntrack entries of endpoints that are gone.
//   - nodedeps: all that an engine of your own needs beside it on a node.
//
// To run beside them:
//   - informer: from client-go's informers to a Provider. No other package needs client-go.
//   - healthcheck: health check node ports, /healthz and /livez.
//   - metrics, tracing: Prometheus and OpenTelemetry.
//   - debughttp: a page about a running proxy.
//   - zaplog: a logger for all of them out of a slog.Logger or a logr.Logger.
//   - proxiertest: tests for programs that embed an engine, or are one.
package serviceplane
