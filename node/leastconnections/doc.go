// Package leastconnections is the policy LeastConnections of package changetracker for engines that choose endpoints in
// the kernel at random: nftables, iptables, ebpf. Packages ipvs and userspace have that policy themselves. A program sets
// ServicePort.Balancing in changetracker.Options.DecorateService and proxier.Config.LeastConnections, makes a Balancer
// with New, and calls Balancer.Run beside Proxier.Run. As long as no service port has the policy, nothing is read.
//
// A Balancer reads from connection tracking how many connections are open to each endpoint (conntrack.OpenConnections),
// and changes the weights of endpoints by Tracker.Override, so that the next connections go where fewer are open. That is
// an approximation:
//
//   - It reads once in Options.Pause at most, so it learns late. Connections that last less than that are distributed
//     nearly as by weight alone.
//   - Between two readings endpoints are chosen at random. An endpoint with too many connections gets few new ones, not
//     none. Small differences change nothing: as long as no endpoint is away from its share of the open connections by
//     eight, and by the square root of the share, weights are as slices say; half of that if they differ already.
//   - It knows the connections that rules of this node have translated, of all Services with the endpoint.
//   - TCP connections count until both sides have closed them. A flow of UDP or SCTP counts until conntrack forgets it.
//   - An endpoint that refuses connections has few. Package endpointhealth ejects it.
//   - A service port stays at random if the node may use more than 128 endpoints of it, if its endpoints times its
//     frontends are more than Options.Changes, if weights are more than 4,095, or from 26 endpoints on 16,383, and while
//     others change them: another Override with a Scale, as in a slow start of package endpointhealth, or
//     Options.EditEndpoints. It does not know what proxier.Config.EditSelection leaves out.
//   - With a traffic policy Local for one kind of traffic, the endpoints of both kinds are compared.
//
// How many new connections are to come it takes from the last reading: the counts rise to one level, relative to the
// weights, if as many come. Where few come, only the endpoints with the fewest connections get them; where more come
// between two readings than are open, the open ones hardly matter.
//
// # Costs
//
// A Balancer reads, and causes syncs, in about a tenth of the time: where it takes a second until weights are programmed,
// they change every ten seconds; after six seconds and more, every minute. Weights that are not programmed after ten
// seconds, because the syncs of a family fail or take longer, go back to those of slices for one to ten minutes. The last
// weights stay in the kernel when the program ends, as all rules do; the first sync of the next one takes them back.
//
// The package builds on all platforms.
package leastconnections
