package userspace

import (
	"context"
	"net"
	"net/netip"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// Hooks let the embedding program take part. Each may be nil. They are called by
// several goroutines at once.
type Hooks struct {
	// Listen opens the socket of a TCP service port; nil means net.ListenConfig. With
	// portals it must not be one of Multipath TCP, which listeners of Go are unless
	// told otherwise: such connections do not know what they were led from.
	Listen func(ctx context.Context, at Site) (net.Listener, error)
	// ListenPacket opens the socket of a UDP service port; nil means net.ListenConfig.
	ListenPacket func(ctx context.Context, at Site) (net.PacketConn, error)
	// Dial connects to an endpoint; nil means net.Dialer. ctx has the deadline of the
	// attempt. A connection without a method CloseWrite is closed as soon as the client
	// has said everything.
	Dial func(ctx context.Context, c Connection, endpoint netip.AddrPort) (net.Conn, error)
	// Pick chooses an endpoint instead of the round robin; ok false leaves it to
	// that. tried are the endpoints that did not answer.
	Pick func(c Connection, endpoints, tried []netip.AddrPort) (endpoint netip.AddrPort, ok bool)
	// Activate is called when a connection, or a datagram, comes to a service port
	// without endpoints: once, and again no sooner than a second later. TCP
	// connections are then held until endpoints come. It must return soon.
	Activate func(ctx context.Context, name changetracker.ServicePortName)
}

// withDefaults sets the hooks that there is always a way without.
func (h Hooks) withDefaults(config net.ListenConfig) Hooks {
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

// Connection is a client's, or a UDP client's flow.
type Connection struct {
	Site
	// Client is where it comes from, and Dialled what it was sent to: a VIP if that is
	// known, or else an address of the socket.
	Client, Dialled netip.AddrPort
}

// Role says which clients a socket is for. Where the engine itself decides who is
// served and by which endpoints, it has a socket for each way to decide; with portals
// it has one for each set of endpoints.
type Role uint8

// The roles.
const (
	// RoleInternal is for clients inside the cluster: internalTrafficPolicy.
	RoleInternal Role = iota + 1
	// RoleExternal is for clients outside: externalTrafficPolicy.
	RoleExternal
	// RoleRestricted is RoleExternal behind the source ranges of a load balancer.
	RoleRestricted
	// RoleCluster is for whom a portal sends to the endpoints of policy Cluster.
	RoleCluster
	// RoleLocal is for whom a portal sends to the endpoints of policy Local.
	RoleLocal
)

// String is a short name of the role.
func (r Role) String() string {
	return enum.Name(r, "", "internal", "external", "restricted", "cluster", "local")
}
