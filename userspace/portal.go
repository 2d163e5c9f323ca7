package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// applyPortals applies what has changed for the portals: changes of endpoints alone do
// not matter to them. It adds their failures to the result.
func (e *Engine) applyPortals(ctx context.Context, update *desired.Update, failed map[changetracker.ServicePortName]bool, result *proxier.Result) error {
	if e.portals == nil {
		return nil
	}
	portals := e.portalUpdate(update, failed)
	if !portals.Full && len(portals.Changes) == 0 && portals.Globals.Equal(&e.portalGlobals) {
		return nil
	}
	applied, err := e.portals.Apply(ctx, portals)
	result.Report, result.Left = applied.Report, applied.Left
	result.Failed = append(result.Failed, applied.Failed...)
	result.Limited = append(result.Limited, applied.Limited...)
	for p := range portals.Services() {
		if e.services[p.Name].portal = p; err != nil {
			e.services[p.Name].portal = nil // it may be written or not
		}
	}
	for _, f := range applied.Failed {
		if s := e.services[f.Name]; s != nil {
			s.portal = nil
		}
	}
	if err == nil {
		e.portalGlobals = update.Globals
	}
	return err
}

// portalUpdate returns the update for the portals. A failed service port keeps its
// current portal.
func (e *Engine) portalUpdate(update *desired.Update, failed map[changetracker.ServicePortName]bool) desired.Update {
	portals := desired.Update{Family: update.Family, Full: update.Full, Globals: update.Globals}
	set := func(name changetracker.ServicePortName, portal *desired.Service) {
		portals.Changes = append(portals.Changes, desired.Change{Name: name, After: portal})
	}
	for name := range update.Removed() {
		set(name, nil)
	}
	for want := range update.Services() {
		s := e.services[want.Name]
		switch {
		case s == nil: // SCTP; the port may have had another protocol before
			if !update.Full {
				set(want.Name, nil)
			}
		case failed[want.Name]:
			if update.Full && s.portal != nil {
				set(want.Name, s.portal)
			}
		default:
			if p := e.portalOf(s, want); update.Full || !samePortal(p, s.portal) {
				set(want.Name, p)
			}
		}
	}
	return portals
}

// portalOf returns the service port for the portals: its frontends, with the proxy ports
// as endpoints. Nothing is masqueraded, so that the sockets see the clients' addresses.
// The portals reject frontends without endpoints, unless the Activate hook can provide
// some. They also reject packets to the proxy ports themselves, which would bypass
// policies and source ranges.
func (e *Engine) portalOf(s *service, want *desired.Service) *desired.Service {
	p := &desired.Service{Name: want.Name, Protocol: want.Protocol, Port: want.Port, Frontends: make([]desired.Frontend, 0, len(s.sockets)+len(want.Frontends))}
	if p.Port != nil && !p.Port.ClientLimit.IsZero() { // the sockets have none
		port := *p.Port
		port.ClientLimit = changetracker.ClientLimit{}
		p.Port = &port
	}
	waits := e.config.Hooks.Activate != nil && slices.ContainsFunc(want.Frontends, func(f desired.Frontend) bool { return f.Action == desired.Reject })
	for key, socket := range s.sockets {
		at := socket.site.Addr
		switch {
		case key.role == RoleLocal && (want.Local.Len() > 0 || waits):
			p.Local = desired.EndpointsOf(at)
		case key.role == RoleCluster && (want.Cluster.Len() > 0 || waits):
			p.Cluster = desired.EndpointsOf(at)
		}
		p.Frontends = append(p.Frontends, desired.Frontend{
			Kind: desired.ExternalIP, VIP: at.Addr(), Port: at.Port(),
			Scope: desired.ScopeCluster, Action: desired.Reject, Masquerade: desired.MasqueradeNone,
		})
	}
	for _, f := range want.Frontends {
		if at, needed := e.reservation(&f); needed && !s.reservations.has(at) {
			continue // another program uses the port
		}
		f.Masquerade = desired.MasqueradeNone
		if waits {
			f.Action = desired.Forward
		}
		p.Frontends = append(p.Frontends, f)
	}
	slices.SortFunc(p.Frontends, func(a, b desired.Frontend) int { return p.Key(&a).Compare(p.Key(&b)) })
	return p
}

func samePortal(a, b *desired.Service) bool {
	return b != nil && a.Protocol == b.Protocol && a.Cluster.Equal(b.Cluster) && a.Local.Equal(b.Local) &&
		slices.EqualFunc(a.Frontends, b.Frontends, desired.Frontend.Equal)
}

// reservations are the ports of the node for which a service port's portals have rules.
// The engine binds them, so that no other program of this machine can use them, and so
// that a port that is in use already is an error. The values are descriptors.
type reservations map[netip.AddrPort]int

// reservation returns the port that a frontend must reserve. Node ports need one, and
// so do VIPs that are the node's own address.
func (e *Engine) reservation(f *desired.Frontend) (at netip.AddrPort, needed bool) {
	needed = f.VIP == e.proxyAddr
	if f.Kind == desired.NodePort {
		needed = len(e.globals.NodePortAddresses) > 0
	}
	return netip.AddrPortFrom(e.proxyAddr, f.Port), needed && !e.config.ShareNodePorts
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
