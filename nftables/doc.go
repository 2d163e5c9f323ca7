// Package nftables is the engine that programs Services into nf_tables, over
// netlink, without the nft program. It is the one to take unless something speaks
// for another: a change costs what it changes, whatever the number of Services. It
// works on Linux only; elsewhere it builds, and New returns proxier.ErrNotSupported.
//
// # Layout
//
// Each IP family has one table with a constant number of sets and maps. Chains
// exist per class of frontends, such as "three endpoints, source kept", and not
// per Service. Whatever else changes with Services and endpoints is an element:
//
//	prerouting, output (nat, -100)
//	  └ services
//	      services     VIP . protocol . port      → class ┐
//	      nodeports    protocol . port (fib local) → class ┴→ classes → chain
//	      cluster-ips  another port of a ClusterIP → reject, unless it is the node's
//	      service-cidrs an address without Service → drop, unless it is the node's
//
//	firewall            source-ranges, else drop; firewalled → class
//	local               pods, node → short-circuit; others: locals → class
//	short-circuit       short-circuits → class
//	MASQ-SCOPE-N        one per class: mark the packet if its source is to be
//	                    masqueraded, draw an index below N, go to pick
//	pick                endpoints: VIP . protocol . port . index → dnat
//	MASQ-SCOPE-affinity mark the packet likewise, go to affinity-SCOPE: the endpoint in
//	                    the client's record, or else a new record of one that is drawn
//	affinity-record     affinity-keys, affinity-timeouts → affinity-timeout-T
//	affinity-timeout-T  affinity: client → endpoint; the record lasts for another T
//	affinity-draw       affinity-counts, affinity-draws → affinity-draw-SCOPE-N
//
//	postrouting (nat, 100)
//	  masquerade what is marked, and connections of an endpoint to itself
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
// The priority (skb->priority) carries numbers between rules because a register
// does not live that long and the packet mark has other users. A locally
// generated first packet of a connection through a VIP loses its SO_PRIORITY;
// other packets keep it.
//
// # Costs
//
// A changed endpoint is one element deleted and one added per frontend, whatever
// the number of Services; one that may be on this node is in the set hairpin too. The maps endpoints and nodeport-endpoints are each
// bound to a single rule, since the kernel does work for each binding when an
// element is added. The first load goes in steps of about 500 elements, so that
// other users of netlink in the same network namespace wait a few milliseconds
// at most.
//
// Each commit of anybody in the network namespace walks all chains. A class that
// nobody needs any more goes with the sync that leaves more than 128 of them. In use
// there are at most 254 affinity timeouts, and for each number of endpoints that some
// service port has, six chains and two with session affinity: they only add up. Who
// wants N different numbers of endpoints needs N²/2 endpoints, so there are few.
//
// # Predecessors, other versions, and damage by others
//
// A table that carries our comment stays in use: sets that are missing are
// created, elements are compared and written one by one, and rules that are not as
// they should be, because of another version or configuration or because somebody
// changed them, are exchanged in one transaction. What is too much goes last. No
// packet meets a gap, and session affinity lasts. The base chains carry the
// version of the layout. Any other table of our name is replaced in one
// transaction.
//
// The kernel tells of changes by others as they happen, and a full sync repairs
// them. The engine does not listen while it loads more than 1,000 elements, since
// notifications make each of them several times dearer: it then asks for the number
// of transactions, and looks at everything again if some were not its own.
//
// # Limits
//
// A service port uses its first 65,536 endpoints, or 7,935 with session affinity;
// 131,071 service ports per family can have session affinity. A timeout of session
// affinity is rounded up: to ten seconds if it is more than a minute, to a minute if
// it is more than ten, to ten minutes if it is more than an hour, to half an hour if it
// is more than twelve. The longest is a day.
package nftables
