package ipvs

import (
	"context"
	"maps"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// keeps chooses the virtual servers that no service port will have any more, and that
// have connections to finish. The rules refuse what is new there until they are gone: or
// other ports of a VIP would lead to the node's own programs, and a successor would not
// know whose the virtual server is.
func (e *Engine) keeps(update *desired.Update, wanted []wantedPort) map[serverKey]bool {
	keep := map[serverKey]bool{}
	if update.Full {
		for key := range e.table.known {
			keep[key] = true
		}
	} else {
		maps.Copy(keep, e.kept)
	}
	leaving := map[changetracker.ServicePortName]bool{}
	for name := range update.Removed() {
		leaving[name] = true
		e.keepAll(keep, name)
	}
	known := map[desired.Key]bool{} // to the rules, by the service ports themselves
	for i := range wanted {
		s := wanted[i].service
		leaving[s.Name] = true
		e.keepAll(keep, s.Name)
		for f := range s.Frontends {
			known[s.Key(&s.Frontends[f])] = true
		}
	}
	maps.DeleteFunc(keep, func(key serverKey, _ bool) bool {
		nodePort := desired.Key{Protocol: key.protocol, Port: key.addr.Port()}
		next, waits := e.nodePorts[key]
		return e.table.known[key] == nil || key.protocol == desired.UDP || known[key.frontend()] ||
			waits && !leaving[next.name] ||
			known[nodePort] && slices.Contains(e.local, key.addr.Addr())
	})
	return keep
}

func (e *Engine) keepAll(keep map[serverKey]bool, name changetracker.ServicePortName) {
	p := e.services[name]
	if p == nil {
		return
	}
	for _, key := range p.keys {
		if e.users[key] == name {
			keep[key] = true
		}
	}
}

// release takes out of the rules what has drained.
func (e *Engine) release(ctx context.Context) error {
	keep := maps.Clone(e.kept)
	maps.DeleteFunc(keep, func(key serverKey, _ bool) bool { return e.table.known[key] == nil })
	if len(keep) == len(e.kept) {
		return nil
	}
	if _, err := e.rules.Apply(ctx, desired.Update{Family: e.family, Globals: e.globals}, e.behind(keep)); err != nil {
		return err
	}
	e.kept = keep
	return nil
}
