package userspace

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// Config configures the userspace engine.
type Config struct {
	proxier.Config
	// Listen are the addresses that sockets listen on, at most one of each family; a
	// family without one listens on its loopback address. Place goes before.
	Listen []netip.Addr
	// Ports are the ports of sockets; the zero value leaves them to the system.
	Ports PortRange
	// UDPIdle is how long a UDP client may be quiet before it is forgotten; 0 means
	// 60s.
	UDPIdle time.Duration
	// UDPClients bounds the UDP clients of a service port; the one that was quiet the
	// longest makes room. 0 means 4096.
	UDPClients int
	// Connections bounds the TCP connections of a service port at a time; more wait
	// in the system's queue. 0 means 65536.
	Connections int
	// Hold is about connections that come when there are no endpoints.
	Hold Hold
	// ProxyProtocol tells endpoints of TCP the client's address, by version 2 of the
	// PROXY protocol. They must expect that.
	ProxyProtocol bool
	Hooks         Hooks
}

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// Hold bounds the connections that wait for endpoints, while an Activator is asked
// for them.
type Hold struct {
	// MaxPerService is how many connections of a service port may wait; 0 means 16.
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
	setDefault(&c.Hold.MaxPerService, defaultHold)
	setDefault(&c.Hold.Timeout, defaultHoldTimeout)
	return c
}

func setDefault[T comparable](field *T, value T) {
	if *field == *new(T) {
		*field = value
	}
}

// Validate reports every field that is wrong. All of its errors are
// proxier.ErrInvalidConfig.
func (c Config) Validate() error {
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
	for field, n := range map[string]int64{
		"UDPIdle": int64(c.UDPIdle), "UDPClients": int64(c.UDPClients), "Connections": int64(c.Connections),
		"Hold.MaxPerService": int64(c.Hold.MaxPerService), "Hold.Timeout": int64(c.Hold.Timeout),
	} {
		if n < 0 {
			bad(field, "%d is negative", n)
		}
	}
	return errors.Join(errs...)
}

// listenAddr is where sockets of a family listen.
func (c *Config) listenAddr(family v1.IPFamily) netip.Addr {
	for _, addr := range c.Listen {
		if addr.Is4() == (family == v1.IPv4Protocol) {
			return addr
		}
	}
	if family == v1.IPv4Protocol {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}
