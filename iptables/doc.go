// Package iptables is the engine that programs Services with iptables-restore. It supports both
// variants of the program, iptables-nft and iptables-legacy. It needs Linux; on other systems it
// builds, and an Engine can only Plan. It is for nodes where other programs use iptables, and
// for kernels without nf_tables.
//
// # Chains
//
// The first packet of a connection passes a tree, instead of a list of all Services:
//
//	PREROUTING, OUTPUT (nat)
//	  └ SERVICES      by the end of the address → VIPS-A, VIPS-1A … at most 16 destinations in each
//	      └ NODEPORTS   addresses of the node: by port → PORTS-17, PORTS-178 …
//	EXT-…    external traffic: sets the masquerade mark; exceptions for pods and the node
//	FW-…     admits the source ranges
//	SVC-…    chooses one of all endpoints, SVL-… one of this node's endpoints; DNAT
//	POSTROUTING
//	  └ HAIRPIN, then masquerades packets with the mark
//
//	INPUT, FORWARD, OUTPUT (filter)
//	  └ SERVICES      the same tree; rejects or drops: no endpoints, or not in the source ranges
//	  └ FORWARD       drops INVALID packets (see Counters); accepts masqueraded packets and replies
//	  └ HEALTH        accepts health check node ports
//
// Names begin with Names.ChainPrefix. With proxier.KubeProxyNames or session affinity,
// each endpoint has its own chain SEP-…, as other programs expect. Otherwise the service
// port's chain translates directly, which loads several times faster. Service ports with
// more than 16 endpoints choose in two or more steps. Weights of endpoints are the
// probabilities of the rules; the load balancing policy is always Random; for LeastConnections see package leastconnections.
//
// # What a sync writes
//
// A change writes the chains of its service ports, and the leaves of the trees that jump
// to them. The engine remembers what it wrote; a full sync reads the kernel and writes the
// differences. Each table is committed atomically. New refusals are written before the
// translations that they replace are deleted, and old refusals are deleted after the new
// translations are written, so that no packet leaks.
//
// Rules of other programs keep their place and order. Missing jumps are inserted before
// the other rules of a built-in chain. Every second, and before and after each write, the
// engine checks whether another program has changed its chains; then it reads and writes
// everything. With the nft variant the kernel reports which process changed which chain.
// With the legacy variant the engine must read all entries, which takes some 30 ms for
// 50,000 rules. It reads less often if that takes more than 5 % of the time, unless the
// size of a table changes.
//
// # Counting connections
//
// Rules that translate see only first packets, so with Config.CountConnections their counters are
// the numbers of connections, which Counts reads. When a chain is written again, its rules count
// from 0: the nft variant reports what they had when they were deleted; with the legacy variant the
// engine reads them just before, and loses what comes between.
//
// # Limits
//
// Session affinity uses the kernel's xt_recent, which stores 100 clients of each endpoint,
// or its module parameter ip_list_tot; each endpoint adds a rule to the packet's way.
// Packets to a ClusterIP at a port that the Service does not have, and to unallocated
// addresses, pass unchanged.
package iptables
