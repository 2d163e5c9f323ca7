package userspace

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// flowEnds are where the flows of service ports lead to: to proxy ports, as long as there
// are endpoints or somebody to ask for some.
func (e *Engine) flowEnds(update *desired.Update) map[changetracker.ServicePortName][]netip.AddrPort {
	all := make(map[changetracker.ServicePortName][]netip.AddrPort, len(update.Changes))
	ends := make([]netip.AddrPort, 0, 2*len(update.Changes)) // of all: one piece of memory
	for want := range update.Services() {
		first := len(ends)
		if s := e.services[want.Name]; s != nil && (len(want.Serving) > 0 || e.config.Hooks.Activate != nil) {
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

// Descriptors are those of Config.Budget; see proxier.Engine.
func (e *Engine) Descriptors() connection.Descriptors { return e.config.Budget.Descriptors() }

// OwnsNames says whether the portals do; see proxier.Engine.
func (e *Engine) OwnsNames() bool {
	o, ok := proxier.As[interface{ OwnsNames() bool }](e.portals)
	return ok && o.OwnsNames()
}

// Traits implements proxier.Engine: those of the portals, but that endpoints see the
// node.
func (e *Engine) Traits(s *desired.Service) desired.Traits {
	var t desired.Traits
	if e.portals != nil {
		t = e.portals.Traits(s)
	}
	t.SourceLost = true
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

// Plan implements proxier.Planner: it tells the sockets and their endpoints. Proxy
// ports are not known before they are open, and so neither are the portals.
func (e *Engine) Plan(update desired.Update) (string, error) {
	planner := &Engine{config: e.config, family: e.family, portals: e.portals, globals: update.Globals}
	if err := planner.chooseAddress(&update); err != nil {
		return "", err
	}
	var text strings.Builder
	for s := range update.Services() {
		if s.Protocol == desired.SCTP {
			continue // refused
		}
		spots, err := planner.spots(s)
		if err != nil {
			return "", err
		}
		lines := make([]string, 0, len(spots))
		for at, t := range spots {
			where := at.addr.String()
			if at.addr.Port() == 0 {
				where = at.addr.Addr().String() + ", any proxy port"
			}
			lines = append(lines, fmt.Sprintf("  %v: %s -> %v %v\n", at.role, where, t.action, s.Endpoints(t.scope)))
		}
		slices.Sort(lines)
		fmt.Fprintf(&text, "%v\n%s", s.Name, strings.Join(lines, ""))
	}
	return text.String(), nil
}
