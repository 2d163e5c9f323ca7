package userspace

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
)

// claims are the ports of the node that a service port's portals take: they are
// bound, so that no program of this machine gets them too, and so that one that has
// them already is noticed.
type claims map[netip.AddrPort]int // descriptors

// claimed returns where a frontend needs a claim: for a node port, and for a VIP that
// is the node's own address.
func (e *Engine) claimed(f *desired.Frontend) (at netip.AddrPort, needed bool) {
	switch {
	case e.config.ShareNodePorts:
		return at, false
	case f.Kind == desired.NodePort && len(e.globals.NodePortAddresses) == 0:
		return at, false
	case f.Kind == desired.NodePort || f.VIP == e.at:
		return netip.AddrPortFrom(e.at, f.Port), true
	default:
		return at, false
	}
}

// disclaim gives back the claims that a service port does not need any more: another
// one may.
func (e *Engine) disclaim(s *service, want *desired.Service) {
	needed := map[netip.AddrPort]bool{}
	for i := range want.Frontends {
		if at, ok := e.claimed(&want.Frontends[i]); ok {
			needed[at] = true
		}
	}
	for at := range s.claims {
		if !needed[at] {
			s.claims.give(at)
			e.config.Budget.listen(-1)
		}
	}
}

// claim takes what the frontends of a service port need. The errors name the ports
// that somebody else has.
func (e *Engine) claim(s *service, want *desired.Service) error {
	var errs []error
	for i := range want.Frontends {
		f := &want.Frontends[i]
		at, ok := e.claimed(f)
		if !ok || s.claims.has(at) {
			continue
		}
		fd, err := bindClaim(e.config.NetNS, want.Protocol, at)
		if err != nil {
			errs = append(errs, fmt.Errorf("claim %v for %v: %w", at, want.Key(f), err))
			continue
		}
		s.claims[at] = fd
		e.config.Budget.listen(1)
	}
	return errors.Join(errs...)
}

func (c claims) has(at netip.AddrPort) bool {
	_, ok := c[at]
	return ok
}

func (c claims) give(at netip.AddrPort) {
	closeClaim(c[at])
	delete(c, at)
}

func (c claims) giveAll() {
	for at := range c {
		c.give(at)
	}
}
