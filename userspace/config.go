package userspace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// Config configures the userspace engine.
type Config struct {
	proxier.Config
	// Place says where sockets listen.
	Place Place
	// Listen are the addresses of proxy ports, at most one of each family. A family
	// without one has its loopback address; with Portals the node's first, or if nobody
	// has told that, the first of this machine's interfaces.
	Listen []netip.Addr
	// Ports are the proxy ports; the zero value leaves them to the system.
	Ports PortRange
	// Portals makes the engine that leads packets from VIPs and node ports to proxy
	// ports, one for each IP family, for example by nftables.NewEngine with the same
	// proxier.Config. It also tells pods, checks source ranges, and refuses what has
	// no endpoints. Closing the engines is left to this one. nil means that clients
	// find the sockets without help.
	Portals func(family v1.IPFamily) (proxier.Engine, error)
	// ShareNodePorts leads packets to portals at node ports, and at VIPs that are the
	// node's own addresses, even when a program of the node has the port too. Without
	// it the engine binds these ports, so that nobody else can, and a service port
	// whose port somebody has is a proxier.ServiceError until it is free.
	ShareNodePorts bool
	// Addresses puts VIPs on this machine for PlaceFrontends; nil means that they are
	// there already.
	Addresses Addresses
	// UDPIdle is how long a UDP client may be quiet before it is forgotten; 0 means
	// 60s.
	UDPIdle time.Duration
	// UDPClients bounds the UDP clients of a socket; the one that was quiet the
	// longest makes room. 0 means 4096.
	UDPClients int
	// Connections bounds the TCP connections of a socket at a time; more wait
	// in the system's queue. 0 means 65536.
	Connections int
	// Budget bounds the descriptors that clients take, in all service ports. Engines
	// with the same Budget share it, also those of other Providers. nil means
	// NewBudget(0), made by WithDefaults: the families of one New share it.
	Budget *Budget
	// Drain is how long TCP connections may go on whose endpoint is gone, or whose
	// Service; 0 means as long as both ends like.
	Drain time.Duration
	// Hold is about connections that come when there are no endpoints.
	Hold Hold
	// ProxyProtocol tells endpoints of TCP the client's address, by version 2 of the
	// PROXY protocol. They must expect that.
	ProxyProtocol bool
	Hooks         Hooks
}

// Place is where sockets listen.
type Place uint8

const (
	// PlaceProxyPorts is the zero value: the service ports have sockets at
	// Config.Listen, each with a port of Config.Ports.
	PlaceProxyPorts Place = iota
	// PlaceFrontends listens on every VIP at the Service's own port, and for a node
	// port on the addresses that accept node ports. A VIP must be an address of this
	// machine, or Config.Addresses make it one.
	PlaceFrontends
)

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// Hold bounds the connections that wait for endpoints, while an Activator is asked
// for them.
type Hold struct {
	// MaxPerService is how many connections of a socket may wait; 0 means 16.
	// More are reset.
	MaxPerService int
	// Timeout is how long they wait; 0 means 2m.
	Timeout time.Duration
}

const (
	defaultUDPIdle     = time.Minute
	defaultUDPClients  = 4096
	defaultConnections = 65536
	defaultHold        = 16
	defaultHoldTimeout = 2 * time.Minute
)

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config {
	c.Config = c.Config.WithDefaults()
	setDefault(&c.UDPIdle, defaultUDPIdle)
	setDefault(&c.UDPClients, defaultUDPClients)
	setDefault(&c.Connections, defaultConnections)
	if c.Budget == nil {
		c.Budget = NewBudget(0)
	}
	setDefault(&c.Hold.MaxPerService, defaultHold)
	setDefault(&c.Hold.Timeout, defaultHoldTimeout)
	c.Hooks = c.Hooks.withDefaults(c.listenConfig())
	return c
}

// listenConfig is how sockets are opened: with portals, connections must know what
// they were led from, and those of Multipath TCP cannot be asked.
func (c *Config) listenConfig() (l net.ListenConfig) {
	if c.Portals != nil {
		l.SetMultipathTCP(false)
	}
	return l
}

func setDefault[T comparable](field *T, value T) {
	if *field == *new(T) {
		*field = value
	}
}

// Validate reports every field that is wrong. Zero fields count as their defaults. All
// of its errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := []error{c.Config.Validate()}
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s: %s", proxier.ErrInvalidConfig, field, fmt.Sprintf(format, args...)))
	}
	seen := map[bool]bool{}
	for i, addr := range c.Listen {
		if !addr.IsValid() || seen[addr.Is4()] {
			bad("Listen", "address %d, %v: want at most one valid address of each IP family", i, addr)
		}
		seen[addr.Is4()] = true
	}
	if c.Ports.First > c.Ports.Last || c.Ports.First == 0 && c.Ports.Last != 0 {
		bad("Ports", "%d-%d: want the first port before the last one, or none at all", c.Ports.First, c.Ports.Last)
	}
	if c.Place > PlaceFrontends {
		bad("Place", "%d: want PlaceProxyPorts or PlaceFrontends", c.Place)
	}
	if c.Portals != nil && slices.ContainsFunc(c.Listen, netip.Addr.IsUnspecified) {
		bad("Listen", "%v: want an address that portals can lead to", c.Listen)
	}
	if c.Place == PlaceFrontends && c.Portals != nil {
		bad("Portals", "want none where sockets listen on VIPs themselves")
	}
	for field, n := range map[string]int64{
		"UDPIdle": int64(c.UDPIdle), "UDPClients": int64(c.UDPClients), "Connections": int64(c.Connections),
		"Drain": int64(c.Drain), "Hold.MaxPerService": int64(c.Hold.MaxPerService), "Hold.Timeout": int64(c.Hold.Timeout),
	} {
		if n < 0 {
			bad(field, "%d is negative", n)
		}
	}
	return errors.Join(errs...)
}

// listenAddr is where the proxy ports of a family are; ok is false when that is to be
// found out.
func (c *Config) listenAddr(family v1.IPFamily, node []netip.Addr) (addr netip.Addr, ok bool) {
	isOurs := func(a netip.Addr) bool { return a.Is4() == (family == v1.IPv4Protocol) }
	if i := slices.IndexFunc(c.Listen, isOurs); i >= 0 {
		return c.Listen[i], true
	}
	switch {
	case c.Portals != nil && len(node) > 0:
		return node[0], true
	case c.Portals != nil:
		return netip.Addr{}, false
	case family == v1.IPv4Protocol:
		return netip.AddrFrom4([4]byte{127, 0, 0, 1}), true
	default:
		return netip.IPv6Loopback(), true
	}
}
