package userspace

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
)

// goal is the wanted state, for what is not about one service port.
type goal struct {
	now     *desired.Resolved
	globals desired.Globals
}

// leadsBack returns an error if an endpoint is a frontend: a connection to it would come back to a
// proxy of this node, and with a Service that is its own endpoint, or two that are each other's, go
// round for ever (PKT-95).
func (s *socket) leadsBack(endpoint netip.AddrPort) error {
	w := s.goal.Load()
	if w == nil {
		return nil
	}
	key := desired.Key{VIP: endpoint.Addr(), Protocol: s.protocol, Port: endpoint.Port()}
	owner, is := w.now.Owner(key)
	if !is {
		key.VIP = netip.Addr{}
		owner, is = w.now.Owner(key)
		is = is && w.globals.TakesNodePorts(endpoint.Addr()) && s.isLocal(endpoint)
	}
	if !is {
		return nil
	}
	return fmt.Errorf("%w: it is a frontend of %v: name pods in the EndpointSlice instead", errLeadsBack, owner)
}

// isLocal reports whether an address is the node's own: then the kernel chooses it as the source, too.
func (s *socket) isLocal(a netip.AddrPort) (is bool) {
	_ = s.refuser.inside(func() error {
		conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(a)) // sends nothing
		if err != nil {
			return err
		}
		is = addrPort(conn.LocalAddr()).Addr() == a.Addr()
		return conn.Close()
	})
	return is
}
