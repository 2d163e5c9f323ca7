package ipvs

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// leavingServers returns the virtual servers that no service port will have, and that may
// still be there, and the frontends without virtual server whose VIP may be. The rules refuse
// new connections there until they are gone: otherwise clients outside the source ranges would
// reach endpoints, others programs of the node, and a successor could not recognize the
// virtual server.
func (e *Engine) leavingServers(update *desired.Update, wanted []wantedPort) map[serverKey]bool {
	draining := maps.Clone(e.table.draining)
	if update.Full {
		for key := range e.table.virtuals {
			draining[key] = true
		}
		for f := range e.found {
			addVIP(draining, f)
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
		s, stays := e.frontends[f]
		return inRules[f] || stays && !leaving[s.name]
	}
	maps.DeleteFunc(draining, func(key serverKey, _ bool) bool {
		nodePort := desired.Key{Protocol: key.protocol, Port: key.addr.Port()}
		onNode := slices.Contains(e.local, key.addr.Addr())
		return e.table.virtuals[key] == nil && !e.boundVIPs[key.addr.Addr()] || served(key.frontend()) || served(nodePort) && onNode
	})
	return draining
}

// addVIP adds the place of the virtual server of a frontend, unless it is a node port.
func addVIP(to map[serverKey]bool, f desired.Key) {
	if f.VIP.IsValid() {
		to[serverKey{f.Protocol, netip.AddrPortFrom(f.VIP, f.Port)}] = true
	}
}

// addServers adds the virtual servers of a service port, and its VIPs.
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
	for f := range p.frontends {
		if e.frontends[f].name == name {
			addVIP(to, f)
		}
	}
}

// releaseGone removes from the rules what they refused until it was gone.
func (e *Engine) releaseGone(ctx context.Context) error {
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
