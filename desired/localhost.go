package desired

import (
	"net/netip"

	v1 "k8s.io/api/core/v1"
)

// Localhost returns the address of localhost in a family: 127.0.0.1 or ::1.
func Localhost(family v1.IPFamily) netip.Addr {
	if family == v1.IPv4Protocol {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

// isLocalhost reports whether an address is 127.0.0.1 or ::1.
func isLocalhost(a netip.Addr) bool {
	return a == Localhost(v1.IPv4Protocol) || a == Localhost(v1.IPv6Protocol)
}

// AtLocalhost returns the service port as a proxy of sockets at localhost has to serve it: its
// node port alone, with the endpoints that the node itself may use. It has no frontend, so that
// the kernel rejects clients, if no endpoint can take a connection. ok is false if it has no
// node port, or one of SCTP, which sockets do not proxy.
func (s *Service) AtLocalhost() (local *Service, ok bool) {
	if s.Protocol == SCTP {
		return nil, false
	}
	for _, f := range s.Frontends {
		if f.Kind != NodePort {
			continue
		}
		if f.ShortCircuit { // the client is the node itself
			f.Scope, f.ShortCircuit = ScopeCluster, false
		}
		one := *s
		one.Frontends = nil
		if s.Endpoints(f.Scope).Len() > 0 {
			f.Action = Forward
			one.Frontends = []Frontend{f}
		}
		return &one, true
	}
	return nil, false
}
