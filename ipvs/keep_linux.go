package ipvs

import (
	"context"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"

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
		vip := desired.Key{VIP: key.addr.Addr(), Protocol: key.protocol, Port: key.addr.Port()}
		nodePort := desired.Key{Protocol: key.protocol, Port: key.addr.Port()}
		next, waits := e.nodePorts[key]
		return e.table.known[key] == nil || key.protocol == desired.UDP || known[vip] ||
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

// keepIn puts into an update of the rules what is to be kept, and takes out what is not
// any more.
func (e *Engine) keepIn(rules *desired.Update, keep map[serverKey]bool) {
	for _, key := range slices.SortedFunc(maps.Keys(keep), compareKeys) {
		if rules.Full || !e.kept[key] {
			rules.Changes = append(rules.Changes, desired.ChangesTo(e.keptService(key))...)
		}
	}
	if rules.Full {
		return
	}
	var gone []desired.Change
	for _, key := range slices.SortedFunc(maps.Keys(e.kept), compareKeys) {
		if !keep[key] {
			gone = append(gone, desired.Change{Name: keptName(key)})
		}
	}
	rules.Changes = append(gone, rules.Changes...)
}

// keptName is no Service's, as it has no namespace.
func keptName(key serverKey) changetracker.ServicePortName {
	name := changetracker.ServicePortName{Port: key.addr.String(), Protocol: v1.Protocol(key.protocol.String())}
	name.Name = "drains"
	return name
}

func (e *Engine) keptService(key serverKey) *desired.Service {
	kind := desired.ClusterIP
	if slices.Contains(e.local, key.addr.Addr()) {
		kind = desired.ExternalIP
	}
	return &desired.Service{
		Name: keptName(key), Protocol: key.protocol,
		Frontends: []desired.Frontend{{
			Kind: kind, VIP: key.addr.Addr(), Port: key.addr.Port(),
			Scope: desired.ScopeCluster, Action: desired.Reject, Masquerade: desired.MasqueradeNone,
		}},
	}
}

// release takes out of the rules what has drained.
func (e *Engine) release(ctx context.Context) error {
	keep := maps.Clone(e.kept)
	maps.DeleteFunc(keep, func(key serverKey, _ bool) bool { return e.table.known[key] == nil })
	if len(keep) == len(e.kept) {
		return nil
	}
	rules := desired.Update{Family: e.family, Globals: e.globals}
	e.keepIn(&rules, keep)
	if _, err := e.rules.Apply(ctx, rules); err != nil {
		return err
	}
	e.kept = keep
	return nil
}
