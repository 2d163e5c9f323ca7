// Package nftables is the engine that programs Services into nf_tables, over
// netlink, without the nft program. It is the default choice: the cost of a change does
// not depend on the number of Services. It works on Linux only; elsewhere it builds, and
// New returns proxier.ErrNotSupported.
//
// # Layout
//
// Each IP family has one table with a constant number of sets and maps. Chains exist per
// class of frontends, such as "three endpoints, source kept", and not per Service. All
// that changes with Services and endpoints is elements:
//
//	prerouting, output (nat, -101)
//	  ├ services
//	  │   services     VIP . protocol . port      → class → classes → chain
//	  ├ frontends      VIP . protocol . port → services-again: look again, or drop
//	  ├ node-ports
//	  │   nodeports    protocol . port (fib local) → class → classes → chain
//	  ├ nodeport-frontends  protocol . port (fib local) → node-ports-again
//	  └ no-service
//	      cluster-ips  another port of a ClusterIP → reject, unless it is the node's
//	      service-cidrs an address without Service → drop, unless it is the node's
//
//	firewall            source-ranges, else drop; firewalled → class
//	limited             limits → limit-classes → limit-RATE-BURST-OPEN-CLASS, which
//	                    refuses or comes back; firewalled → class. limited-ranges: the
//	                    same behind source-ranges. Only with client limits
//	local               pods, node → short-circuit; others: locals → class
//	short-circuit       short-circuits → class
//	MASQ-SCOPE-N        one per class: mark the packet if its source is to be
//	                    masqueraded, draw the index of one of N slots, go to pick
//	MASQ-SCOPE-source-N, MASQ-SCOPE-source-port-N: the same with a hash of the source
//	pick                endpoints: VIP . protocol . port . index → dnat; with
//	                    CountConnections also endpoint-counters: the same key
//	MASQ-SCOPE-affinity mark the packet likewise, go to affinity-SCOPE: the endpoint in
//	                    the client's record, or else a new record of a random one
//	affinity-record     affinity-keys, affinity-timeouts → affinity-timeout-T
//	affinity-timeout-T  affinity: client → endpoint; restarts the timeout T of the record
//	affinity-draw       affinity-counts, affinity-draws → affinity-draw-SCOPE-N
//
//	postrouting (nat, 99)
//	  masquerade marked packets, and connections of an endpoint to itself
//
// # A packet's way
//
// The first packet of a connection to 10.96.0.10:80/TCP is looked up in the map
// services. The class that it finds travels to the next rule in the packet's
// priority, where the verdict map classes leads to the chain, for example
// keep-cluster-3. That chain writes a random index from 0 to 2 into the priority
// and goes to pick, which finds the endpoint under VIP, protocol, port and index,
// resets the priority and translates the destination. All further packets of the
// connection are translated by conntrack alone: there are no filter chains.
//
// A packet that comes while its service port changes may find no endpoint, because the elements that
// it meets are from before and after the transaction, or on older kernels because an element is being
// replaced. The sets frontends and nodeport-frontends have what never changes of a frontend: its key.
// A packet with such a key looks three times more, and is dropped if a transaction comes between each
// time. So no packet for a frontend leaves without translation, and its client sends it again. The chain
// of a new class exists before elements lead there.
//
// The priority (skb->priority) carries numbers between rules because a register
// does not live that long and the packet mark has other users. A locally
// generated first packet of a connection through a VIP loses its SO_PRIORITY;
// other packets keep it.
//
// # Load balancing
//
// A slot holds an endpoint, and an endpoint has as many slots as its weight says: exactly up to
// 128 slots, otherwise 1,024, or at least 8 for each endpoint. With the policies SourceHash and
// SourcePortHash, slots are those of package maglev, and the index is the kernel's jhash of
// the client's address, or address and port, with a constant seed. Seed and tables never
// change, so that nodes of different versions agree. The policy LeastConnections is Random,
// by the weights that package leastconnections gives.
//
// # Costs
//
// A changed endpoint is one element deleted and one added per frontend; an endpoint that
// may be on this node is also in the set hairpin. The maps endpoints and
// nodeport-endpoints are each bound to a single rule, or two with CountConnections, because an
// added element costs the kernel time for each binding. The first load has steps of about 500 elements, so that
// other programs in the network namespace wait a few milliseconds at most.
//
// Each commit in the network namespace walks all chains. A sync deletes the unused classes
// if there are more than 128. There are at most 254 affinity timeouts, and for each number
// of endpoints that a service port has, six chains and two with session affinity. N
// different numbers of endpoints need N²/2 endpoints, so there are few.
//
// # Counting connections
//
// With Config.CountConnections, the rules that translate also count, in sets that packets
// write: endpoint-counters, nodeport-endpoint-counters and affinity-endpoint-counters have the
// keys of the maps endpoints, nodeport-endpoints and affinity-endpoints. Only the first packet of
// a connection gets there. So each connection is counted once, when its endpoint is chosen,
// whether or not the endpoint answers. If a later rule drops that packet, and the client sends it
// again, it counts again.
//
// An endpoint has no counter before its first connection, so that syncs do not become slower. A
// counter stays when its element in the map is written again. When it gets another endpoint, the
// engine reads it right afterwards, by its key, and adds the difference to the numbers of the
// last endpoint. Connections of the next endpoint since the change, usually less than a
// millisecond, count for the last one. The numbers of a service port lose nothing in
// syncs. They lose what was not read if another program deletes the table or its counters. Full
// syncs delete the counters that no endpoint has.
//
// Each set has room for 1,048,576 counters: further endpoints work and are not counted. Without
// CountConnections the sets are empty.
//
// # Client limits
//
// The chain of a limit has two sets of its own, which packets write, with the VIP and the client as key: one with the
// rate, one with the open connections. Its number is made of the limit, rounded up to a few steps, and a hash of the
// namespace, so that another process finds it again. Rules write into the priority that a packet is above the limit, count
// it in the set refused if connections are counted, and refuse it. These sets and chains exist while somebody asks for a
// limit. A packet that looks again is counted again.
//
// # Fast path
//
// With Config.FastPathAfter, the flowtable fast-path has a hook at ingress of each device. It forwards
// the packets of the connections in it, past all rules. The chain fast-path at hook forward, after the
// chains in which others filter, puts connections there that were answered, that have had so many
// packets, and that are to an element of the set fast-vips, or from a node port to an endpoint in
// fast-nodeports. docs/FASTPATHS.md says what others lose by that.
//
// The devices follow the node's while Watch runs, in transactions of their own, and in each full
// update. A flowtable of ours is never emptied: a restart and a repair leave connections there.
//
// # Predecessors, other versions, and damage by others
//
// A table with our comment stays in use: missing sets are created, only different elements
// are written, and rules of another version or configuration, or damaged ones, are
// replaced in one transaction. Extra objects are deleted last. No packet misses the rules,
// and session affinity lasts. The base chains have the version of the layout. Any other
// table of our name is replaced in one transaction.
//
// The kernel reports changes by other programs, and a full sync repairs them. The engine
// does not listen while it writes more than 1,000 elements, because notifications make
// each write several times slower. It then reads the number of transactions. If some were not
// its own, it compares the table with what it knows, beside further changes, and a full sync
// follows only if they differ.
//
// # Limits
//
// A service port uses its first 65,536 endpoints, 65,521 with a consistent hash, or 7,935 with
// session affinity; 131,071 service ports per family can have session affinity. A timeout of session
// affinity is rounded up: to ten seconds if it is more than a minute, to a minute if
// it is more than ten, to ten minutes if it is more than an hour, to half an hour if it
// is more than twelve. The longest is a day. A family has 256 different client limits, and each
// namespace 16, with 2,048 clients each.
package nftables
