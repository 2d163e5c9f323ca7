package userspace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// reservations are the ports of the node for which a service port's portals have rules.
// The engine binds them, so that no other program of this machine can use them, and so
// that a port that is in use already is an error. The values are descriptors.
type reservations map[netip.AddrPort]int

// reservation returns the port that a frontend must reserve. Node ports need one, and
// so do VIPs that are the node's own address.
func (e *Engine) reservation(f *desired.Frontend) (at netip.AddrPort, needed bool) {
	switch {
	case e.config.ShareNodePorts:
		return at, false
	case f.Kind == desired.NodePort && len(e.globals.NodePortAddresses) == 0:
		return at, false
	case f.Kind == desired.NodePort || f.VIP == e.proxyAddr:
		return netip.AddrPortFrom(e.proxyAddr, f.Port), true
	default:
		return at, false
	}
}

// releaseUnneeded releases the ports that a service port no longer needs, before another
// one reserves them.
func (e *Engine) releaseUnneeded(s *service, want *desired.Service) {
	for at, fd := range s.reservations {
		isNeeded := func(f desired.Frontend) bool {
			of, ok := e.reservation(&f)
			return ok && of == at
		}
		if !slices.ContainsFunc(want.Frontends, isNeeded) {
			closeReservation(fd)
			delete(s.reservations, at)
			e.config.Budget.listen(-1)
		}
	}
}

// reserve reserves the ports of a service port's frontends. The error names those that
// another program uses.
func (e *Engine) reserve(s *service, want *desired.Service) error {
	var errs []error
	for i := range want.Frontends {
		f := &want.Frontends[i]
		at, ok := e.reservation(f)
		if !ok || s.reservations.has(at) {
			continue
		}
		fd, err := reservePort(e.config.NetNS, want.Protocol, at)
		if err != nil {
			errs = append(errs, fmt.Errorf("reserve port %v for %v: %w", at, want.Key(f), err))
			continue
		}
		s.reservations[at] = fd
		e.config.Budget.listen(1)
	}
	return errors.Join(errs...)
}

func (r reservations) has(at netip.AddrPort) bool {
	_, ok := r[at]
	return ok
}
