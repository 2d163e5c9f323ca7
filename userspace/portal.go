package userspace

import (
	"context"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// lead tells the portals what has changed for them: endpoints come and go without.
// What they are not able to do for a service port is among what failed.
func (e *Engine) lead(ctx context.Context, update *desired.Update, failed map[changetracker.ServicePortName]bool, result *proxier.Result) error {
	if e.portals == nil {
		return nil
	}
	portals := e.portalUpdate(update, failed)
	if !portals.Full && len(portals.Changes) == 0 && portals.Globals.Equal(&e.led) {
		return nil
	}
	led, err := e.portals.Apply(ctx, portals)
	result.Report = led.Report
	result.Failed = append(result.Failed, led.Failed...)
	for p := range portals.Services() {
		if e.services[p.Name].portal = p; err != nil {
			e.services[p.Name].portal = nil // who knows
		}
	}
	for _, f := range led.Failed {
		if s := e.services[f.Name]; s != nil {
			s.portal = nil
		}
	}
	if err == nil {
		e.led = update.Globals
	}
	return err
}

// portalUpdate is what the portals must become. A service port that has failed
// keeps the portal that it has.
func (e *Engine) portalUpdate(update *desired.Update, failed map[changetracker.ServicePortName]bool) desired.Update {
	portals := desired.Update{Family: update.Family, Full: update.Full, Globals: update.Globals}
	gone := slices.Collect(update.Removed())
	var there []*desired.Service
	for want := range update.Services() {
		s := e.services[want.Name]
		switch {
		case s == nil: // SCTP, where another protocol may have been
			if !update.Full {
				gone = append(gone, want.Name)
			}
		case failed[want.Name]:
			if update.Full && s.portal != nil {
				there = append(there, s.portal)
			}
		default:
			if p := e.portalOf(s, want); update.Full || !samePortal(p, s.portal) {
				there = append(there, p)
			}
		}
	}
	for _, name := range gone {
		portals.Changes = append(portals.Changes, desired.Change{Name: name})
	}
	portals.Changes = append(portals.Changes, desired.ChangesTo(there...)...)
	return portals
}

// portalOf is what the portals are told of a service port: its frontends, with the
// proxy ports for endpoints. Clients keep their addresses, so that the sockets see
// them. What has no endpoints the portals refuse, unless somebody can be asked for
// some. Whoever goes to a proxy port without a portal is refused too: nobody gets
// around policies and source ranges.
func (e *Engine) portalOf(s *service, want *desired.Service) *desired.Service {
	p := &desired.Service{Name: want.Name, Protocol: want.Protocol, Port: want.Port}
	waits := e.config.Hooks.Activate != nil && slices.ContainsFunc(want.Frontends, func(f desired.Frontend) bool { return f.Action == desired.Reject })
	for spot, socket := range s.sockets {
		at := []netip.AddrPort{socket.site.Addr}
		switch {
		case spot.role == RoleLocal && (len(want.Local) > 0 || waits):
			p.Local = at
		case spot.role == RoleCluster && (len(want.Cluster) > 0 || waits):
			p.Cluster = at
		}
		p.Frontends = append(p.Frontends, desired.Frontend{
			Kind: desired.ExternalIP, VIP: at[0].Addr(), Port: at[0].Port(),
			Scope: desired.ScopeCluster, Action: desired.Reject, Masquerade: desired.MasqueradeNone,
		})
	}
	for _, f := range want.Frontends {
		if at, needed := e.claimed(&f); needed && !s.claims.has(at) {
			continue // somebody else's
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
	return b != nil && a.Protocol == b.Protocol && slices.Equal(a.Cluster, b.Cluster) && slices.Equal(a.Local, b.Local) &&
		slices.EqualFunc(a.Frontends, b.Frontends, desired.Frontend.Equal)
}
