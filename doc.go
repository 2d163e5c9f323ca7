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
//   - runner: runs a function with a rate limit, retries and backoff.
//   - proxier: Provider, Engine, Config and Status, and the driver of all engines.
//     proxier/connection: numbers of connections, and what userspace reports about each.
//
// Engines:
//   - nftables, iptables, ipvs, ebpf, userspace: the engines.
//     userspace/localhost: node ports at 127.0.0.1 and ::1 for every engine.
//   - hybrid: combines engines: one for each Service.
//   - conntrack: deletes stale conntrack entries.
//
// What feeds them, and tests them:
//   - informer: from client-go's informers to a Provider.
//   - proxiertest: tests for embedders and for engines. proxiertest/history: random
//     histories. proxiertest/vectors: which endpoints a node chooses, for any language.
//
// What watches and serves on a node, below node/. None of them is needed for Services to work:
//   - node/metrics, node/tracing: Prometheus and OpenTelemetry.
//   - node/healthcheck: health check node ports, /healthz and /livez.
//   - node/debughttp: a page that shows a running proxy.
//   - node/packettrace: follows packets through the rules of a node.
//   - node/canary: tests the data plane with connections of its own.
//   - node/programmed, node/programmed/cluster: tells, over HTTP and by Leases, which changes a
//     node, or every node, has programmed.
//   - node/endpointhealth: ejects endpoints that fail although they are ready.
//   - node/leastconnections: sends new connections where few are open, in engines of the kernel.
//   - node/nodedeps: the Deps that an engine of your own needs on a node.
//   - node/zaplog: makes a *zap.Logger from a slog.Logger or a logr.Logger.
//   - node/nodeproxy: a module of its own: the whole node proxy, as a program and as a part of
//     yours, with spctl, its command line.
//
// The examples are a module too. Only informer, node/programmed/cluster and node/nodeproxy need client-go.
package serviceplane
