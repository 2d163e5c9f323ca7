// Package userspace is a proxy of sockets: it accepts the connections of a Service
// itself and passes bytes on to an endpoint. It needs no kernel feature and no
// privilege, and runs on Linux, Windows and macOS. It is slower than the engines
// that program a kernel, and endpoints see the proxy's address instead of the
// client's; but it can try another endpoint when one does not answer, hold
// connections until there is an endpoint, and let the embedding program do the
// dialling.
//
// # Sockets
//
// Every service port gets one socket for what comes from inside the cluster, and
// another one for what comes from outside if its traffic policies differ. Where
// they listen is decided by Config.Place; without it, on a loopback address, at a
// port of Config.Ports. Engine.Sockets tells where.
//
// # Connections
//
// A TCP connection is passed on to the endpoint whose turn it is. If that does not
// answer within 250 ms the next one is tried for 500 ms, then 1 s, then 2 s. Each
// direction is closed when its sender closes it, and the other one lasts on. On
// Linux the kernel moves the bytes (splice(2)).
//
// UDP clients get an upstream socket each, until they have been quiet for
// Config.UDPIdle.
package userspace
