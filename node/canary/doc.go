// Package canary tests a proxy's data plane with connections of its own. A proxy can write all of
// its rules and still forward nothing: another program drops the packets, or changes the rules, or
// the kernel does not do what was written. Such a proxy is healthy by its syncs. It is for programs
// that want to know whether the rules work, and not only that they were written.
//
// Run gives a Provider one Service for each IP family, beside those of the cluster: a reserved
// VIP with one endpoint, which is a socket of this process on an address of the node. Every 10
// seconds it connects to the VIP. Only the rules of the Provider's engine lead there:
//
//	process ──▶ VIP, port 9 ──▶ rules of the engine ──▶ node address, port of the socket
//
// Each connection sends a number that was drawn for it, and the socket answers with another
// one that was drawn with it. So no other program, and no other canary, can pass for it.
//
// The connections are the node's own: they show that the rules for local connections work,
// with masquerading and the way back. What pods and other hosts send takes the same rules at
// another hook; a program that drops only forwarded packets stays unnoticed.
//
// # The reserved VIPs
//
// They are outside all ranges that clusters use, and packets to them go nowhere if no rule
// translates them:
//
//   - 192.0.0.7, of 192.0.0.0/29. RFC 7335: systems use this range inside, and do "not emit
//     IPv4 packets on the wire" with it.
//   - 100::7, of the discard prefix 100::/64 (RFC 6666). A router that knows the prefix
//     discards its packets; others have no route.
//
// The Services are in Namespace, which is no valid name of a Kubernetes namespace, so no
// object of a cluster can be meant. Several Providers in one network namespace need different
// VIPs. The package builds on all platforms.
package canary
