// Package userspace is a proxy that works with sockets: it accepts the connections of a
// Service and copies their bytes to an endpoint. It needs no kernel feature and no
// privilege, and runs on Linux, Windows and macOS. It is slower than the engines that
// program a kernel, and endpoints see the proxy's address instead of the client's. But
// it can try another endpoint if one does not answer, hold connections until there is
// an endpoint, and let the embedding program dial.
//
// # How clients connect
//
//	Config                     a service port has                      clients connect to
//	Portals                    a proxy port for each set of            VIP and node port, translated by
//	                           endpoints, on the node's address        nf_tables or iptables rules
//	(default)                  a proxy port for each traffic policy    the proxy port: Engine.Sockets, Listen
//	                           and for source ranges, on loopback
//	AtFrontends                a socket on each VIP                    VIP, which is this machine's address
//
// Portals are another engine of this library that gets the proxy ports as endpoints. In
// the kernel it recognizes pods, checks source ranges, rejects, and repairs damage; a
// change of endpoints does not touch its rules. Clients that connect to a proxy port
// itself are refused.
//
// # Connections
//
// A TCP connection goes to the endpoint that the load balancing policy of the service port
// chooses; by default, to the next one in round robin order, by weight. Sockets have all
// policies. With a consistent hash, package nftables chooses the same endpoint. If it does
// not answer within 250 ms, the next one is tried for 500 ms, then 1 s, then 2 s (Config.DialTimeouts). Each
// direction ends when its sender closes it; the other one continues. On Linux the
// kernel copies large pieces (splice(2)). When the endpoint or the Service is removed,
// the connection may last for Config.Drain; it ends with the engine.
//
// Each UDP client has an upstream socket, until the flow has been idle for
// Config.UDPIdle or the endpoint stops serving. Answers come from the address that the
// client sent to.
//
// An Observer that is a connection.Observer receives a report about each connection;
// Engine.Traffic counts connections.
//
// # Limits
//
// SCTP is not supported. A restart ends all connections, unless Config.Linger is set. A TCP connection needs two
// descriptors, and a UDP client one: a Budget shares those of the process among the
// service ports.
package userspace
