package changetracker

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// Source is a part of a Tracker with its own objects: those of another cluster, or of a
// registry that is not Kubernetes. A change of one Source does not change the objects of
// others. All Sources form one State:
//
//   - If several Sources have a Service, the Source with the first name has it, in each
//     IP family. The tracker's own objects come before all others.
//   - The endpoints of a Service are those of all Sources. EndpointSlices of the same name
//     in two Sources are two slices.
//   - Nodes belong to the cluster of the Source: the Node and NodeHints of an Endpoint are
//     prefixed with the name of the Source, "west/node-1". So no endpoint of a Source is
//     local to the tracker's node, even if the names are equal. State.For of a Node with the
//     full name is the view of that node. Zones are common to all.
type Source struct {
	Services  *ServiceChangeTracker
	Endpoints *EndpointChangeTracker
	name      string
	store     *store
}

// Source returns the Source with the name; the same name is the same Source. The empty name is
// the tracker's own Source, which Services and Endpoints of the Tracker belong to. Its nodes
// are the tracker's.
func (t *Tracker) Source(name string) *Source {
	return &Source{
		Services:  &ServiceChangeTracker{store: t.store, from: name, lent: t.lent},
		Endpoints: &EndpointChangeTracker{store: t.store, from: name, lent: t.lent},
		name:      name, store: t.store,
	}
}

// Replace replaces everything that the Source has, however it was added. An Apply sees all of
// it or nothing, and only differences are changes. ports are as for ServiceChangeTracker.Set, of any number of
// Services, in any order; endpoints are as for EndpointChangeTracker.Set, and their service ports may be those of
// another Source. It costs the size of both and of what is tracked. The error names every invalid value; nothing has changed then. Otherwise
// the Source is Synced. For changed see ServiceChangeTracker.Update; it may also be true if
// equal endpoints replace those of EndpointSlices.
func (s *Source) Replace(ports []ServicePort, endpoints map[ServicePortName][]Endpoint) (changed bool, err error) {
	byService := map[types.NamespacedName][]ServicePort{}
	for _, p := range ports {
		byService[p.Name.NamespacedName] = append(byService[p.Name.NamespacedName], p)
	}
	services := make(map[types.NamespacedName]perFamily[[]*ServicePort], len(byService))
	var faults []error
	for _, name := range slices.SortedFunc(maps.Keys(byService), compareNames) {
		canonical, err := canonicalPorts(name, byService[name])
		services[name] = canonical
		faults = append(faults, err)
	}
	byPort := make(map[ServicePortName]perFamily[[]Endpoint], len(endpoints))
	for _, name := range slices.SortedFunc(maps.Keys(endpoints), ServicePortName.Compare) {
		canonical, err := s.store.canonicalEndpoints(s.name, name, endpoints[name])
		if byPort[name] = canonical; err != nil {
			faults = append(faults, fmt.Errorf("endpoints of %s: %w", name, err))
		}
	}
	if err := errors.Join(faults...); err != nil {
		return false, fmt.Errorf("replace the content of source %q: %w", s.name, err)
	}
	return s.store.replace(s.name, services, byPort), nil
}

// Synced reports that the Tracker has received everything that the Source has. For the
// tracker's own Source it is Tracker.Synced of InputServices and InputEndpointSlices, for
// others that of their SourceInput.
func (s *Source) Synced() {
	s.store.mu.Lock()
	defer s.store.unlock()
	s.store.synced(s.name)
}

// replace is Source.Replace.
func (s *store) replace(from string, services map[types.NamespacedName]perFamily[[]*ServicePort], endpoints map[ServicePortName]perFamily[[]Endpoint]) (changed bool) {
	s.mu.Lock()
	defer s.unlock()
	note := func(is bool) { changed = changed || is }
	for key, at := range s.owners {
		if key.from == from {
			note(s.evict(key, at))
		}
	}
	for _, object := range s.problems.of(from) {
		s.report(findings{object: object})
	}
	for _, f := range s.families {
		if f != nil {
			note(f.retain(from, services, endpoints))
		}
	}
	for name, ports := range services {
		note(s.takeService(from, name, ports))
	}
	for name, list := range endpoints {
		note(s.takeEndpoints(from, name, list))
	}
	s.synced(from)
	return changed
}

// retain removes what a Source has of all other Services, and the hand-built endpoints of all
// other service ports.
func (f *family) retain(from string, services map[types.NamespacedName]perFamily[[]*ServicePort], endpoints map[ServicePortName]perFamily[[]Endpoint]) (changed bool) {
	for name, held := range f.services {
		if _, stays := services[name]; !stays && f.placePorts(from, name, nil) {
			changed = true
		}
		for key := range held.byHand {
			port := ServicePortName{NamespacedName: name, Port: key.port, Protocol: key.protocol}
			if _, stays := endpoints[port]; !stays && f.setEndpoints(from, port, nil) {
				changed = true
			}
		}
	}
	return changed
}

// synced records that a Source is known.
func (s *store) synced(from string) {
	if from != "" {
		s.gate.known(SourceInput(from))
		return
	}
	s.gate.known(InputServices)
	s.gate.known(InputEndpointSlices)
}
