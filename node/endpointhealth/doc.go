// Package endpointhealth takes endpoints that fail out of service on this node, although their
// readiness probes succeed: a pod that answers kubelet and nobody else, a node that is
// partitioned, a process that hangs. It works through Tracker.Override of package changetracker,
// so it serves every engine. Nothing is checked unless Options.Choose asks for it.
//
// A Checker learns of failures in two ways:
//
//   - Active: it runs the Probe of a service port's CheckPolicy at each endpoint that the node may
//     use: TCP, HTTP, or a function of the program (Func), for example for UDP. Service ports
//     with the same endpoint and the same CheckPolicy share one check.
//   - Passive: package userspace reports the connections that it opened (Observer). Beside
//     engines of the kernel, ReportConnections of package conntrack reports those that the kernel
//     has tracked, to Suspect. Any other source calls Report, or Suspect.
//
// # Decisions
//
// An endpoint fails after CheckPolicy.Failures failed checks, or CheckPolicy.PassiveFailures failed
// connections, without a success in between. Then it is ejected: new connections avoid it, as if
// it were not ready, and Explain says so. It returns after CheckPolicy.Successes successful checks,
// and not before its time of ejection is over. This time doubles with each ejection, up to
// CheckPolicy.MaxEjectFor, so that an endpoint which comes and goes does not make the data plane do
// the same. Of each list of endpoints that frontends use (traffic policy Cluster, traffic policy
// Local) at most CheckPolicy.MaxEjected is ejected, and never the last endpoint. Of a group of endpoints
// (changetracker.Endpoint.Priority) all that fail are ejected while an endpoint of another group does not
// fail: so that group serves instead. But with a traffic policy Local, the last endpoint of the node stays while its
// group serves on elsewhere. Groups that stand by are checked too.
//
// With CheckPolicy.SlowStart, a returning endpoint gets its share of new connections in steps, by
// weight: meanwhile the weights of the service port's other endpoints are multiplied.
//
// Changes that are decided at about the same time become one sync. Overrides have By
// "endpointhealth", so each Tracker has one Checker at most. When Run ends, it removes its Overrides.
//
// Every node checks for itself, from its own address. A check does not go through the rules of
// the engine, but straight to the endpoint; for the rules see package canary. The package
// builds on all platforms.
package endpointhealth
