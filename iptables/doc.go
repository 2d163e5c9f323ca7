// Package iptables is the engine that programs Services with iptables-restore, for
// nodes and people that live with iptables. It works with both variants of the
// tool, iptables-nft and iptables-legacy. It works on Linux only; elsewhere it builds,
// and an Engine can Plan and nothing else.
//
// # Chains
//
// A packet that begins a connection walks a tree, and not a list of all Services:
//
//	PREROUTING, OUTPUT (nat)
//	  └ SERVICES      by the end of the address → VIPS-A, VIPS-1A … at most 16 destinations in each
//	      └ NODEPORTS   addresses of the node: by port → PORTS-17, PORTS-178 …
//	EXT-…    from outside: masquerade, or tell pods and the node from others
//	FW-…     who is in the source ranges
//	SVC-…    all endpoints, SVL-… those of this node: one is drawn, DNAT
//	POSTROUTING
//	  └ HAIRPIN, then masquerade what is marked
//
//	INPUT, FORWARD, OUTPUT (filter)
//	  └ SERVICES      the same tree, with what is refused: no endpoints, or not in the source ranges
//	  └ FORWARD       packets out of order; what is masqueraded, and answers
//	  └ HEALTH        health check node ports are let in
//
// The names begin with Names.ChainPrefix. With proxier.KubeProxyNames, or session
// affinity, each endpoint has a chain of its own, SEP-…, as other software expects;
// otherwise the service port's chain translates by itself, which is several times
// cheaper to load. Service ports with more than 16 endpoints draw in two steps or
// more.
//
// # What a sync writes
//
// A change writes the chains of its service ports and the leaves of the trees that
// lead to them. The engine knows what it has written; it reads the kernel at full
// syncs, and writes what differs. Each table is committed at once: refusals come
// before, and go after, the translations that they stand in for, so that no packet
// leaks.
//
// Rules of others stay as they are, and in their order. The engine's jumps are put
// in front of a built-in chain's other rules when they are missing. Every second, and
// before and after each write, it looks whether somebody else has changed its chains;
// then it reads and writes everything. With the nft variant the kernel tells who changed
// which chain. With the legacy variant the engine reads all entries for that, which takes
// some 30 ms of 50,000 rules, and it does so less often when that is more than 5 % of the
// time, unless the size of a table changes.
//
// # Limits
//
// Session affinity uses the kernel's xt_recent, which remembers 100 clients of each
// endpoint unless its module parameter ip_list_tot says otherwise; it walks a rule
// for each endpoint. Packets to a ClusterIP at a port that the Service has not, and
// to unallocated addresses, are left alone.
package iptables
