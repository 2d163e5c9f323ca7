// Package leastconnections is the policy LeastConnections of package changetracker for engines that
// choose endpoints in the kernel by chance: nftables, iptables, ebpf. Packages ipvs and userspace have that policy
// themselves. Nothing is read while no service port has it.
//
// A Balancer reads how many connections are open to each endpoint, from this node, and changes the weights of endpoints
// by Tracker.Override, so that the next connections go where fewer are open. That is an approximation:
//
//   - It reads once a second at most, and less often if a reading takes long, so it learns late. Connections that last
//     less than that are distributed nearly as by weight alone.
//   - Between two readings endpoints are chosen by chance. An endpoint with too many connections gets few new ones, at
//     the least a sixteenth of what it would get, not none.
//   - Each node knows its own connections.
//   - TCP connections count until both sides have closed them. A flow of UDP or SCTP counts until conntrack forgets it.
//
// How many new connections are to come it takes from the last reading: the counts rise to one level, relative to the
// weights, if as many come. Where little comes, only the endpoints with the fewest connections get it; where more comes
// in a second than is open, the open ones hardly matter.
//
// The package builds on all platforms.
package leastconnections
