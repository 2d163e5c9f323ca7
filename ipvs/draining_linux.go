package ipvs

import (
	"context"
	"maps"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// drainingServers returns the virtual servers that no service port will have, and that may
// still have connections. The rules refuse new connections there: otherwise other ports of
// the VIP would reach programs of the node, and a successor could not recognize the
// virtual server. Those of UDP do not drain; the rules have them until they are removed if
// nothing else would tell a successor about them, because they are on addresses of the node.
func (e *Engine) drainingServers(update *desired.Update, wanted []wantedPort) map[serverKey]bool {
	draining := maps.Clone(e.table.draining)
	if update.Full {
		for key := range e.table.virtuals {
			draining[key] = true
		}
	}
	leaving := map[changetracker.ServicePortName]bool{}
	for name := range update.Removed() {
		leaving[name] = true
		e.addServers(draining, name)
	}
	inRules := map[desired.Key]bool{} // frontends of service ports
	for i := range wanted {
		s := wanted[i].service
		leaving[s.Name] = true
		e.addServers(draining, s.Name)
		for f := range s.Frontends {
			inRules[s.Key(&s.Frontends[f])] = true
		}
	}
	served := func(f desired.Key) bool {
		owner, stays := e.frontends[f]
		return inRules[f] || stays && !leaving[owner]
	}
	maps.DeleteFunc(draining, func(key serverKey, _ bool) bool {
		nodePort := desired.Key{Protocol: key.protocol, Port: key.addr.Port()}
		onNode := slices.Contains(e.local, key.addr.Addr())
		return e.table.virtuals[key] == nil || key.protocol == desired.UDP && !onNode || served(key.frontend()) || served(nodePort) && onNode
	})
	return draining
}

// addServers adds the virtual servers of a service port.
func (e *Engine) addServers(to map[serverKey]bool, name changetracker.ServicePortName) {
	p := e.services[name]
	if p == nil {
		return
	}
	for _, key := range p.keys {
		if e.owners[key] == name {
			to[key] = true
		}
	}
}

// releaseDrained removes virtual servers that have drained from the rules.
func (e *Engine) releaseDrained(ctx context.Context) error {
	refused := maps.Clone(e.refused)
	maps.DeleteFunc(refused, func(key serverKey, _ bool) bool { return e.table.virtuals[key] == nil })
	if len(refused) == len(e.refused) {
		return nil
	}
	if _, err := e.rules.Apply(ctx, desired.Update{Family: e.family, Globals: e.globals}, e.behind(refused)); err != nil {
		return err
	}
	e.refused = refused
	return nil
}
