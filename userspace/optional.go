package userspace

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// flowEnds returns the destinations of the conntrack entries of service ports that stay:
// the sockets, if there are endpoints or a hook that provides some.
func (e *Engine) flowEnds(update *desired.Update) map[changetracker.ServicePortName][]netip.AddrPort {
	all := make(map[changetracker.ServicePortName][]netip.AddrPort, len(update.Changes))
	ends := make([]netip.AddrPort, 0, 2*len(update.Changes)) // one allocation for all
	for want := range update.Services() {
		first := len(ends)
		if s := e.services[want.Name]; s != nil && (want.Serving.Len() > 0 || e.config.Hooks.Activate != nil) {
			for _, socket := range s.sockets {
				ends = append(ends, socket.site.Addr)
			}
		}
		own := ends[first:len(ends):len(ends)]
		slices.SortFunc(own, netip.AddrPort.Compare)
		all[want.Name] = own
	}
	return all
}

// Abilities implements proxier.Engine. Watch watches the portals; Dump prints the sockets and the portals;
// Descriptors are the figures of Config.Budget.
func (e *Engine) Abilities() proxier.Abilities {
	can := proxier.Abilities{Watch: e.watch, Plan: e.Plan, Dump: e.Dump, Counts: e.Counts, Verify: e.Verify, Descriptors: e.config.Budget.Descriptors}
	if e.portals != nil {
		can.OwnsNames = e.portals.Abilities().OwnsNames
	}
	return can
}

// Traits implements proxier.Engine. They are those of the portals; endpoints see the node's
// address instead of the client's, and sockets have all load balancing policies.
func (e *Engine) Traits(s *desired.Service) desired.Traits {
	var t desired.Traits
	if e.portals != nil {
		t = e.portals.Traits(s)
	}
	t.SourceLost, t.LeastConnections, t.NoHash, t.Scheduler = true, policies.LeastConnections, policies.NoHash, policies.Scheduler
	return t
}

func (e *Engine) watch(ctx context.Context, damaged func(proxier.Damage)) error {
	if e.portals != nil {
		if watch := e.portals.Abilities().Watch; watch != nil {
			return watch(ctx, damaged)
		}
	}
	<-ctx.Done()
	return nil
}

// Dump is for Abilities.
func (e *Engine) Dump(ctx context.Context, w io.Writer) error {
	for _, at := range e.Sockets() {
		if _, err := fmt.Fprintf(w, "%v %v %v/%s\n", at.Name, at.Role, at.Addr, at.Name.Protocol); err != nil {
			return err
		}
	}
	if e.portals == nil || e.portals.Abilities().Dump == nil {
		return nil
	}
	return e.portals.Abilities().Dump(ctx, w)
}
