package userspace

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/invalid"
	"github.com/serviceplane/serviceplane/proxier"
)

// Config configures the userspace engine.
type Config struct {
	proxier.Config
	// AtFrontends makes sockets listen on every VIP at the service port, and for a node port on the addresses that
	// accept node ports. A VIP must be an address of this machine, unless Addresses assigns it. Otherwise sockets
	// listen on Listen, each at a port of Ports.
	AtFrontends bool
	// Listen are the addresses of proxy ports, at most one for each IP family. The
	// default is the loopback address; with Portals it is the node's first address, or
	// if Config.Node has none, the first one of this machine's interfaces.
	Listen []netip.Addr
	// Ports are the proxy ports; with the zero value the system chooses them.
	Ports PortRange
	// Portals creates the engine that translates VIPs and node ports to proxy ports,
	// one for each IP family, for example by nftables.NewEngine with the same
	// proxier.Config. That engine also recognizes pods, checks source ranges, and
	// rejects Services without endpoints. The userspace engine closes it. nil means no
	// portals: clients connect to the sockets themselves.
	Portals func(family v1.IPFamily) (proxier.Engine, error)
	// ShareNodePorts makes portals work at node ports, and at VIPs that are the node's
	// own addresses, even if another program of the node uses the port. Without it the
	// engine binds these ports itself. A service port whose port another program uses
	// is then a proxier.ServiceError until the port is free.
	ShareNodePorts bool
	// Addresses assigns VIPs to this machine for AtFrontends; nil means that the
	// VIPs are assigned already.
	Addresses Addresses
	// DialTimeouts are those of the attempts to connect to an endpoint over TCP, each to another one if there
	// is one. Nil means 250ms, 500ms, 1s and 2s.
	DialTimeouts []time.Duration
	// UDPIdle is how long a UDP flow may be idle before it ends; 0 means 60s.
	UDPIdle time.Duration
	// UDPClients is the maximum number of UDP clients of a socket. A new client
	// replaces the one that has been idle longest. 0 means 4096.
	UDPClients int
	// Connections is the maximum number of open TCP connections of a socket. Further
	// clients wait in the system's queue. 0 means 65536.
	Connections int
	// Budget limits the descriptors of clients, over all service ports. Engines with
	// the same Budget share it, also those of other Providers. nil means NewBudget(0),
	// created by WithDefaults: the IP families of one New share it.
	Budget *Budget
	// Drain is how long TCP connections may last after their endpoint or Service was
	// removed; 0 means without limit.
	Drain time.Duration
	// Linger is how long connections may continue after Run has ended otherwise. Meanwhile
	// sockets at proxy ports accept new ones. Those at the ports of frontends are closed, with
	// their UDP flows: the Names and the ports of frontends are free, and another process can program the node
	// in any mode. It is over early when there has been no connection for five seconds.
	// 0 means that all connections end at once.
	Linger time.Duration
	// HoldConnections is how many TCP connections of a socket may wait for endpoints after a call of
	// Hooks.Activate; 0 means 16. Further ones are reset. HoldTimeout is how long each may wait; 0 means 2m.
	HoldConnections int
	HoldTimeout     time.Duration
	// ProxyProtocol sends the client's address to TCP endpoints, with version 2 of the
	// PROXY protocol. The endpoints must support it.
	ProxyProtocol bool
	Hooks         Hooks
}

// PortRange is a range of ports, First and Last included.
type PortRange struct{ First, Last uint16 }

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config {
	c.Config = c.Config.WithDefaults()
	c.UDPIdle = cmp.Or(c.UDPIdle, time.Minute)
	c.UDPClients = cmp.Or(c.UDPClients, 4096)
	if c.DialTimeouts == nil {
		c.DialTimeouts = []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second}
	}
	c.Connections = cmp.Or(c.Connections, 65536)
	if c.Budget == nil {
		c.Budget = NewBudget(0)
	}
	c.HoldConnections = cmp.Or(c.HoldConnections, 16)
	c.HoldTimeout = cmp.Or(c.HoldTimeout, 2*time.Minute)
	c.Hooks = c.Hooks.withDefaults(c.Portals != nil)
	return c
}

// Validate reports every invalid field. Zero fields count as their defaults. All of its
// errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := invalid.Fields{c.Config.Validate()}
	bad := errs.Add
	c.validateListen(bad)
	if c.Ports.First > c.Ports.Last || c.Ports.First == 0 && c.Ports.Last != 0 {
		bad("Ports", "%d-%d: want the first port before the last one, or none at all", c.Ports.First, c.Ports.Last)
	}
	if len(c.DialTimeouts) == 0 || slices.Min(c.DialTimeouts) <= 0 {
		bad("DialTimeouts", "%v: want positive ones, or nil", c.DialTimeouts)
	}
	if c.AtFrontends && c.Portals != nil {
		bad("Portals", "want none where sockets listen on VIPs themselves")
	}
	for field, n := range map[string]int64{
		"UDPIdle": int64(c.UDPIdle), "UDPClients": int64(c.UDPClients), "Connections": int64(c.Connections),
		"Drain": int64(c.Drain), "Linger": int64(c.Linger), "HoldConnections": int64(c.HoldConnections), "HoldTimeout": int64(c.HoldTimeout),
	} {
		if n < 0 {
			bad(field, "%d is negative", n)
		}
	}
	return errors.Join(errs...)
}

func (c *Config) validateListen(bad func(field, format string, args ...any)) {
	seen := map[bool]bool{}
	for i, addr := range c.Listen {
		if !addr.IsValid() || seen[addr.Is4()] {
			bad("Listen", "address %d, %v: want at most one valid address of each IP family", i, addr)
		}
		seen[addr.Is4()] = true
	}
	if c.Portals != nil && slices.ContainsFunc(c.Listen, netip.Addr.IsUnspecified) {
		bad("Listen", "%v: want an address that portals can lead to", c.Listen)
	}
}
