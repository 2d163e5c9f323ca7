package changetracker

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// UnmatchedSlice is an EndpointSlice that serves no port of its Service.
type UnmatchedSlice struct {
	Family v1.IPFamily
	Name   string
	// Ports are its ports, such as "web/TCP", in order; a port without a name is "/TCP".
	Ports     []string
	Endpoints int
}

// Unmatched returns the EndpointSlices of a Service that have no port with the name and the protocol of one of
// the Service's, sorted by family and name. No endpoint of them is used: mostly a port's name is misspelt.
// It walks what is tracked of the Service, and may be called from any goroutine.
func (t *Tracker) Unmatched(service types.NamespacedName) (all []UnmatchedSlice) {
	t.store.mu.Lock()
	defer t.store.mu.Unlock()
	for _, f := range t.store.families {
		if f == nil || f.services[service] == nil {
			continue
		}
		held := f.services[service]
		for _, s := range held.slices {
			if len(held.ports) > 0 && !slices.ContainsFunc(s.ports, func(p numberedKey) bool { return held.hasPort(p.portKey) }) {
				all = append(all, unmatched(familyName(f.index), s))
			}
		}
	}
	return all
}

func (s *heldService) hasPort(key portKey) bool {
	return slices.ContainsFunc(s.ports, func(p *ServicePort) bool { return p.Name.key() == key })
}

func unmatched(family v1.IPFamily, s *heldSlice) UnmatchedSlice {
	u := UnmatchedSlice{Family: family, Name: s.name, Endpoints: len(s.endpoints)}
	for i := range s.ports {
		u.Ports = append(u.Ports, s.ports[i].port+"/"+string(s.ports[i].protocol))
	}
	u.Ports = slices.Compact(u.Ports)
	return u
}
