// Package localhost lets any engine accept node ports at 127.0.0.1 and ::1, TCP and UDP
// (KEP-6032). The kernel cannot translate packets to ::1, and those to 127.0.0.1 only with the
// setting route_localnet, which exposes the programs of the node that listen there. So a proxy
// of sockets, package userspace, listens at localhost, at the node ports that have endpoints
// and no others. All other traffic stays with the wrapped engine.
//
// proxier.Config.NodePorts decides whether node ports are accepted at localhost; see its fields
// Localhost and Addresses. A socket is one descriptor of the process, from Config.Budget.
//
// Clients are programs of the node. All endpoints of the Service serve them, also under
// externalTrafficPolicy Local, as at the node's other addresses. Endpoints see an address of
// the node. With session affinity all clients at localhost have the same endpoint, because they
// have one address. Without endpoints the kernel rejects clients, because there is no socket.
//
// If another program uses the port, the service port is a proxier.ServiceError until the port
// is free; its other frontends work. Node ports of SCTP are not served. Connections end with
// the process, unlike those that the kernel forwards.
//
// Other hosts cannot reach the sockets: on Linux those at 127.0.0.1 are bound to the interface
// lo, because route_localnet would let packets pass (CVE-2020-8558).
//
// The package builds on all platforms.
package localhost
