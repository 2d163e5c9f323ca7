package changetracker

import (
	"net/netip"
	"slices"
)

// Override changes an endpoint beyond what slices say: for a health checker of its own, or for
// an operator. The zero value changes nothing.
type Override struct {
	// Eject stops new connections, as if the endpoint had failed its readiness probe: it stays
	// in the State, but is neither Ready nor Serving. If that would leave the service port
	// without a usable endpoint on any node, none of its endpoints is ejected.
	Eject bool
	// Weight replaces Endpoint.Weight. 0 does not change it.
	Weight uint16
}

// overrides are those of one service port.
type overrides map[netip.AddrPort]Override

// apply returns the list itself if it changes nothing, and otherwise a changed copy.
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
			e.Ready, e.Serving, e.Ejected = false, false, e.Usable()
		}
	}
	return list
}
