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
	"github.com/serviceplane/serviceplane/userspace/connection"
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

// Descriptors returns the figures of Config.Budget; see proxier.Engine.
func (e *Engine) Descriptors() connection.Descriptors { return e.config.Budget.Descriptors() }

// OwnsNames reports whether the portals own kernel objects; see proxier.Engine.
func (e *Engine) OwnsNames() bool {
	o, ok := proxier.As[interface{ OwnsNames() bool }](e.portals)
	return ok && o.OwnsNames()
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

// Watch implements proxier.Watcher: it watches the portals.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	if w, ok := proxier.As[proxier.Watcher](e.portals); ok {
		return w.Watch(ctx, damaged)
	}
	<-ctx.Done()
	return nil
}

// Dump implements proxier.Dumper: it prints the sockets and the portals.
func (e *Engine) Dump(ctx context.Context, w io.Writer) error {
	for _, at := range e.Sockets() {
		if _, err := fmt.Fprintf(w, "%v %v %v/%s\n", at.Name, at.Role, at.Addr, at.Name.Protocol); err != nil {
			return err
		}
	}
	if d, ok := proxier.As[proxier.Dumper](e.portals); ok {
		return d.Dump(ctx, w)
	}
	return nil
}
