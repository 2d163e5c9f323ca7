// Package userspace is a proxy of sockets: it accepts the connections of a Service
// itself and passes bytes on to an endpoint. It needs no kernel feature and no
// privilege, and runs on Linux, Windows and macOS. It is slower than the engines
// that program a kernel, and endpoints see the proxy's address instead of the
// client's; but it can try another endpoint when one does not answer, hold
// connections until there is an endpoint, and let the embedding program do the
// dialling.
//
// # How clients get here
//
//	Config                     a service port has                      clients come by
//	Portals                    a proxy port for each set of            VIP and node port, led by nf_tables
//	                           endpoints, on the node's address        or iptables rules
//	(nothing)                  a proxy port for each traffic policy    the proxy port: Engine.Sockets, Listen
//	                           and for source ranges, on loopback
//	Place: PlaceFrontends      a socket on each VIP                    VIP, which is this machine's address
//
// Portals are any other engine of this library, which is given the proxy ports in the
// place of endpoints. It decides who is a pod, who is admitted and what is refused,
// in the kernel, and repairs what others damage; a change of endpoints does not
// concern it. Who dials a proxy port itself is refused.
//
// # Connections
//
// A TCP connection is passed on to the endpoint whose turn it is. If that does not
// answer within 250 ms the next one is tried for 500 ms, then 1 s, then 2 s. Each
// direction is closed when its sender closes it, and the other one lasts on. On
// Linux the kernel moves the bytes (splice(2)). A connection outlives its endpoint
// and its Service, for Config.Drain; it ends with the engine.
//
// UDP clients get an upstream socket each, until they have been quiet for
// Config.UDPIdle, or their endpoint does not serve any more. Answers come from the
// address that was asked.
//
// An Observer that is a connection.Observer hears of each connection;
// Engine.Traffic counts them.
//
// # Limits
//
// There is no SCTP. A restart ends all connections, as the process is part of them.
// A connection needs two descriptors, and a UDP client one: a Budget shares those of
// the process among the service ports.
package userspace
