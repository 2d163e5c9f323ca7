package userspace

import (
	"context"
	"net"
	"net/netip"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// Hooks let the embedding program open sockets and choose endpoints. Each may be nil.
// Several goroutines call them at once.
type Hooks struct {
	// Listen opens the socket of a TCP service port; nil means net.ListenConfig. With
	// portals, Multipath TCP must be off (net.ListenConfig.SetMultipathTCP): its sockets
	// do not report the original destination of a connection.
	Listen func(ctx context.Context, at Site) (net.Listener, error)
	// ListenPacket opens the socket of a UDP service port; nil means net.ListenConfig.
	ListenPacket func(ctx context.Context, at Site) (net.PacketConn, error)
	// Dial connects to an endpoint; nil means net.Dialer. ctx has the deadline of the
	// attempt. A connection without a method CloseWrite is closed as soon as the client
	// closes its half.
	Dial func(ctx context.Context, c Connection, endpoint netip.AddrPort) (net.Conn, error)
	// Pick chooses an endpoint; if ok is false, the load balancing policy does. tried are the
	// endpoints that did not answer. Connection.Peek shows what the client has sent.
	Pick func(c Connection, endpoints, tried []netip.AddrPort) (endpoint netip.AddrPort, ok bool)
	// Activate is called when a connection or a datagram arrives for a service port
	// without endpoints, at most once per second. TCP connections then wait for
	// endpoints; see Config.HoldConnections. Activate must return soon.
	Activate func(ctx context.Context, name changetracker.ServicePortName)
}

// withDefaults sets the Listen hooks if they are nil. With portals, Multipath TCP is off.
func (h Hooks) withDefaults(portals bool) Hooks {
	var config net.ListenConfig
	if portals {
		config.SetMultipathTCP(false)
	}
	if h.Listen == nil {
		h.Listen = func(ctx context.Context, at Site) (net.Listener, error) {
			return config.Listen(ctx, at.Network, at.Addr.String())
		}
	}
	if h.ListenPacket == nil {
		h.ListenPacket = func(ctx context.Context, at Site) (net.PacketConn, error) {
			return config.ListenPacket(ctx, at.Network, at.Addr.String())
		}
	}
	return h
}

// Site is where a socket listens.
type Site struct {
	Name changetracker.ServicePortName
	Role Role
	// Network is "tcp4", "tcp6", "udp4" or "udp6".
	Network string
	Addr    netip.AddrPort
}

// Connection is a TCP connection, or a UDP client's flow.
type Connection struct {
	Site
	// Client is the source, and Dialled the destination: a VIP if that is known, or else
	// an address of the socket.
	Client, Dialled netip.AddrPort

	first *firstBytes // of TCP, if hooks may want them
}

// Role says which clients a socket serves. Without portals, a service port has a socket
// for each policy that its clients may fall under; with portals, one for each set of
// endpoints.
type Role uint8

// The roles.
const (
	// RoleInternal is for clients inside the cluster: internalTrafficPolicy.
	RoleInternal Role = iota + 1
	// RoleExternal is for clients outside the cluster: externalTrafficPolicy.
	RoleExternal
	// RoleRestricted is RoleExternal with loadBalancerSourceRanges.
	RoleRestricted
	// RoleCluster is behind portals, for the endpoints of policy Cluster.
	RoleCluster
	// RoleLocal is behind portals, for the endpoints of policy Local.
	RoleLocal
)

// String returns a short name of the role.
func (r Role) String() string {
	return enum.Name(r, "", "internal", "external", "restricted", "cluster", "local")
}
