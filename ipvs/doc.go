// Package ipvs is the engine that programs Services with the kernel's IP Virtual Server:
// for its schedulers, for many Services, and for draining. It needs Linux; on other systems
// it builds, and New returns proxier.ErrNotSupported.
//
// # Objects
//
//	virtual server   for each VIP and port, and for each node address that accepts node
//	                 ports; the endpoints are its real servers
//	dummy device     holds the VIPs (Names.Device), so that packets for them reach the
//	                 input hook, where IPVS is. It is down. An address that the node already
//	                 has is not added
//	iptables         with Config.Firewall, chains that accept health check node ports
//	nf_tables        a table NAME.ipvs, similar to that of package nftables: it rejects,
//	                 drops and masquerades, with a constant number of rules
//
// # A packet's way
//
// The first packet of a connection passes the table in prerouting, or in output if it is
// from the node itself. The table refuses packets to frontends without endpoints, from
// outside the source ranges, and to other ports of a VIP. It may set the masquerade mark.
// Packets to a health check node port go to the node. Packets to a frontend that connection
// tracking calls INVALID meet no rule of NAT, and are dropped. IPVS takes the others at the input or
// output hook, translates the destination and stores the connection. In postrouting the
// table masquerades packets with the mark, hairpin connections, and connections of the node
// from a VIP: this needs IPVS with connection tracking (net.ipv4.vs.conntrack).
//
// # Changes
//
// Rules, addresses and virtual servers do not change at once. At each moment a packet fares as
// before a change or as after it, or is refused: the rules close first. A frontend that is new,
// or that opens to more clients while its real servers change, drops new connections until
// they are written. What goes is refused until its virtual server and VIP are gone.
//
// # Load balancing
//
// With policy Random, the Config's scheduler chooses the real server: round robin, unless it
// says otherwise. SourceHash and SourcePortHash are the scheduler mh, with a fallback, so
// that a draining real server keeps no new clients, LeastConnections is lc. If weights
// differ, rr is wrr and lc is wlc. A changed policy edits the virtual server, and connections
// stay. While the kernel changes a scheduler it has none: the rules drop new connections for
// that moment, so that clients try again and are not refused: TCP clients wait about a second.
// The table of mh depends on the order in which real servers were added too. Where two nodes
// added them in other orders, by a simulation 0.5 % of the slots differ with 10 real servers,
// and 4.5 % with 100.
//
// # Draining
//
// A real server that is no longer wanted gets weight 0: its TCP connections continue, new
// ones use other real servers. It is deleted when it has no connections, or after
// Config.Drain. If it is wanted again, it gets new connections at once. Real servers of UDP
// are deleted at once, unless their endpoint is still serving. A successor recognizes
// draining real servers by their weight.
//
// # Leaving
//
// When the node has another engine, Leaving removes all objects without ending connections.
// New ones go by the rules of the other engine, which come before IPVS. Open ones, UDP
// flows too, stay in IPVS at weight 0. The VIPs are local routes then, and no addresses:
// the node's own new connections would have a VIP as their source otherwise, and end with
// it. A table NAME.ipvs-leaving names the virtual servers, so that the next process
// continues, and refuses what no rule of the other engine translates. A virtual server
// without connections is deleted, with its conntrack entries. After the last one, or after
// Config.Drain, nothing is left. If the engine returns before, it takes over the rest.
//
// # Counting connections
//
// With Config.CountConnections, Counts adds up the kernel's counters of real servers. They count
// each connection, or UDP flow, when its real server is chosen, also packets of flows that are
// scheduled one by one. What the rules refuse is not counted. A changed weight keeps the counter.
// The kernel sums up its counters every two seconds: a reading is up to that old. So with
// CountConnections real servers drain for three seconds at least. UDP flows of the last two seconds
// before their endpoint is removed are not counted. The kernel keeps a deleted real server while
// it has connections: if it returns, it continues to count. If the process has restarted in
// between, what it had counted before counts again. With the sysctl net.ipv4.vs.run_estimation 0
// the kernel does not sum up, and nothing is counted.
//
// # Ownership
//
// The hardware address of the device is derived from the Names, so that a successor
// recognizes it. If the device of that name has another one, syncs fail, and the device
// stays as it is. Only with proxier.KubeProxyNames the engine takes over a dummy device
// kube-ipvs0 of kube-proxy.
//
// A virtual server belongs to the instance if its address is on the device, or if its
// frontend is in the table, perhaps by a predecessor. All others stay as they are.
//
// # Differences
//
// A virtual server has one set of real servers for all clients: under external policy
// Local, pods and the node reach local endpoints only, as long as there are any (PKT-23,
// PKT-25). Session affinity is for each VIP (PKT-60), and lasts as long as the kernel stores
// one of the client's connections.
//
// IPVS looks up answers by endpoint and client, not by VIP. If a client has two connections at a
// time from one source port, to two VIPs or ports with the same endpoint, the older one gets no
// more answers. Linux chooses such ports for about one in 14,000 pairs of connections.
//
// When a real server is deleted, IPVS soon forgets its UDP flows. A datagram in between is lost: a
// program of the node gets EPERM from its send. The next datagram reaches another endpoint.
package ipvs
