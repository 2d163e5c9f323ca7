package changetracker

import (
	"net/netip"
	"slices"
)

// Override is what somebody knows of an endpoint beside what slices say: a health
// checker of its own, or an operator. The zero value is none.
type Override struct {
	// Eject keeps new connections away, as if the endpoint had failed its readiness
	// probe: it stays in the State, neither Ready nor Serving. Where that would leave a
	// service port without a usable endpoint, on any node, nothing of it is ejected.
	Eject bool
	// Weight replaces Endpoint.Weight. 0 leaves it as it is.
	Weight uint16
}

// overrides are those of one service port.
type overrides map[netip.AddrPort]Override

// apply returns list itself when there is nothing to do, or else a changed copy.
func (o overrides) apply(list []Endpoint) []Endpoint {
	if len(o) == 0 {
		return list
	}
	ejects := slices.ContainsFunc(list, func(e Endpoint) bool { return e.Usable() && !o[e.Addr].Eject })
	list = slices.Clone(list)
	for i := range list {
		e := &list[i]
		own := o[e.Addr]
		if own.Weight != 0 {
			e.Weight = canonicalWeight(own.Weight)
		}
		if own.Eject && ejects {
			e.Ready, e.Serving = false, false
		}
	}
	return list
}
