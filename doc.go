// Package serviceplane is a library of Kubernetes Service proxy engines: what
// kube-proxy does on a node, for programs that import it. It exports nothing;
// this page lists the packages. The kernel engines need Linux; all other packages
// build everywhere.
//
// # Two ways in
//
// A program that wants working Services takes an engine and passes events to it. Call
// New of package nftables, iptables, ipvs, ebpf or userspace. It returns a
// [github.com/serviceplane/serviceplane/proxier.Proxier], which has the handlers that
// informers call, Run, Sync, Status, Explain and Cleanup.
//
// A program with a data plane of its own takes the change trackers of package
// changetracker: an immutable State for each IP family, and a Delta that is consumed
// only when the program says so. Package desired decides what each Service means for
// packets. The next step is to implement
// [github.com/serviceplane/serviceplane/proxier.Engine]; then rate limits, retries,
// health and metrics come from package proxier.
//
// # Packages
//
// Decisions, without a kernel:
//   - changetracker: Services and EndpointSlices to State and Delta.
//   - desired: frontends, endpoints, session affinity, source ranges and masquerade of
//     each Service port.
//   - maglev: the tables of a consistent hash.
//   - runner: runs a function with a rate limit, retries and backoff.
//   - proxier: Provider, Engine, Config and Status, and the driver of all engines.
//
// Engines, and what they need on a node:
//   - nftables, iptables, ipvs, ebpf, userspace: the engines.
//   - userspace/connection: what userspace reports about each connection.
//   - userspace/localhost: node ports at 127.0.0.1 and ::1 for every engine.
//   - hybrid: combines engines: one for each Service.
//   - conntrack: deletes stale conntrack entries.
//   - nodedeps: the Deps that an engine of your own needs on a node.
//
// Integration and observation:
//   - informer: from client-go's informers to a Provider.
//   - programmed, programmed/cluster: tells, over HTTP and by Leases, which changes a node, or every node,
//     has programmed. Only programmed/cluster and informer need client-go.
//   - canary, canary/nftrace: tests the data plane with connections of its own.
//   - endpointhealth: ejects endpoints that fail although they are ready.
//   - healthcheck: health check node ports, /healthz and /livez.
//   - metrics, tracing: Prometheus and OpenTelemetry.
//   - debughttp: a page that shows a running proxy.
//   - spctl: a command line that shows the same.
//   - packettrace: follows packets through the rules of a node.
//   - zaplog: makes a *zap.Logger from a slog.Logger or a logr.Logger.
//   - proxiertest: tests for embedders and for engines.
package serviceplane
