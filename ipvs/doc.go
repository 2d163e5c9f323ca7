// Package ipvs is the engine that gives Services to the kernel's IP Virtual Server, for
// its schedulers, its scale, and connections that end in their own time. It works on
// Linux only; elsewhere it builds, and New returns proxier.ErrNotSupported.
//
// # Objects
//
//	virtual server   for each VIP and port, and for each node address that accepts node
//	                 ports, with the endpoints as real servers
//	dummy device     holds the VIPs (Names.Device), so that packets for them come to
//	                 where IPVS is: input. It is down, and an address that the node has
//	                 anyway is not put there
//	iptables         with Config.Firewall, chains that let health check node ports in
//	nf_tables        a table NAME.ipvs, much like that of package nftables: what is
//	                 refused, dropped and masqueraded, in a constant number of rules
//
// # A packet's way
//
// The first packet of a connection meets the table in prerouting, or in output where it
// comes from the node itself. What has no endpoints, comes from outside the source
// ranges, or goes to another port of a VIP, ends there. The rest may be marked for
// masquerading; but at a health check node port the node answers. IPVS takes it at the
// input, or output, hook, translates its destination and remembers the connection. In
// postrouting, what is marked is masqueraded, as are
// connections of an endpoint to itself, and of the node from a VIP: for that IPVS must
// work with connection tracking (net.ipv4.vs.conntrack).
//
// # Draining
//
// A real server that is wanted no more gets weight 0: its TCP connections go on, new
// ones go elsewhere. It is deleted when it has none, or after Config.Drain. One that is
// wanted again takes new connections at once. Real servers of UDP are deleted at once,
// unless their endpoint still serves. A successor finds what drains by its weight.
//
// # Others' objects
//
// The device has a hardware address that is derived from the Names: by it a successor
// knows it. A device of that name with another one is somebody else's: syncs fail and
// say so, and it stays as it is. Only with proxier.KubeProxyNames a dummy device
// kube-ipvs0 that kube-proxy has left becomes ours.
//
// A virtual server is ours when its address is on our device, or when our table, which a
// predecessor may have left, knows its frontend. No other one is ever touched.
//
// # What differs
//
// A virtual server has one set of real servers for everybody: under external policy
// Local, pods and the node reach local endpoints only, as long as there are any
// (PKT-23, PKT-25). Session affinity is for each VIP (PKT-60), and lasts as long as the
// kernel remembers one of the client's connections.
package ipvs
