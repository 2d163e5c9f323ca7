package changetracker

import (
	"net/netip"
	"slices"
)

// Override changes an endpoint beyond what slices say: for a health checker of its own, or for
// an operator. The zero value changes nothing.
type Override struct {
	// Eject stops new connections, as if the endpoint had failed its readiness probe: it stays
	// in the State, but is neither Ready nor Serving. If that would leave the service port no ready
	// endpoint although one is ready, or none that is usable, none of its endpoints is ejected: connections
	// must not come back to endpoints that terminate. With a traffic policy Local, the same holds for the endpoints of
	// a node on which one terminates.
	Eject bool
	// Weight replaces Endpoint.Weight. 0 does not change it.
	Weight uint16
}

// overrides are those of one service port.
type overrides map[netip.AddrPort]Override

// apply returns the list itself if it changes nothing, and otherwise a changed copy. local means that some
// frontend uses the endpoints of its node alone.
func (o overrides) apply(list []Endpoint, local bool) []Endpoint {
	if len(o) == 0 {
		return list
	}
	plain := list
	ejects := o.mayEject(plain, func(*Endpoint) bool { return true })
	ejectsOn := func(node string) bool {
		onNode := func(e *Endpoint) bool { return e.Node == node }
		drains := func(e Endpoint) bool { return onNode(&e) && e.draining() }
		return !local || !slices.ContainsFunc(plain, drains) || o.mayEject(plain, onNode)
	}
	list = slices.Clone(list)
	for i := range list {
		e := &list[i]
		own := o[e.Addr]
		if own.Weight != 0 {
			e.Weight = canonicalWeight(own.Weight)
		}
		if own.Eject && ejects && ejectsOn(e.Node) {
			e.Ready, e.Serving, e.Ejected = false, false, e.Usable()
		}
	}
	return list
}

// mayEject reports whether the ejections leave one of the best of some endpoints: a ready one if there is one,
// otherwise one that serves while it terminates.
func (o overrides) mayEject(list []Endpoint, some func(*Endpoint) bool) bool {
	var ready, readyStays, stays bool
	for i := range list {
		if e := &list[i]; some(e) {
			kept := !o[e.Addr].Eject
			ready, readyStays, stays = ready || e.Ready, readyStays || kept && e.Ready, stays || kept && e.Usable()
		}
	}
	return readyStays || !ready && stays
}
