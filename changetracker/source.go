package changetracker

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// Source is a part of a Tracker with objects of its own: those of another cluster, or of a
// registry that is not Kubernetes. What is done to a Source changes no other's objects.
// All are one State:
//
//   - A Service that several Sources have is, in each IP family, that of the one whose name
//     comes first. The tracker's own objects come before all.
//   - The endpoints of a Service are those of all Sources. EndpointSlices of the same name
//     are one for each Source.
//   - Nodes are those of the Source's own cluster: an Endpoint's Node and NodeHints get the
//     Source's name in front, "west/node-1". So no endpoint of a Source is local to the
//     tracker's node, though the names may be the same. State.For of a Node with the full
//     name is that node's view. Zones are common to all.
type Source struct {
	Services  *ServiceChangeTracker
	Endpoints *EndpointChangeTracker
	name      string
	store     *store
}

// Source returns the Source of a name; the same name is the same Source. With the empty
// name it is the tracker's own, which Services and Endpoints of the Tracker belong to, and
// whose nodes are the tracker's.
func (t *Tracker) Source(name string) *Source {
	return &Source{
		Services:  &ServiceChangeTracker{store: t.store, from: name},
		Endpoints: &EndpointChangeTracker{store: t.store, from: name},
		name:      name, store: t.store,
	}
}

// Snapshot is everything that a Source has.
type Snapshot struct {
	// ServicePorts are as for ServiceChangeTracker.Set, of any number of Services, in any
	// order.
	ServicePorts []ServicePort
	// Endpoints are as for EndpointChangeTracker.Set. Their service ports may be those of
	// another Source.
	Endpoints map[ServicePortName][]Endpoint
}

// Replace puts a Snapshot in the place of everything that the Source has, whichever way it
// came. Whoever applies a family sees all of it or nothing, and only what is different is a
// change. It costs what the Snapshot has and what is tracked. When it returns an error,
// which names every invalid value, nothing has changed. Else the Source is Synced. For
// changed see ServiceChangeTracker.Update; it may also be true for EndpointSlices in whose
// place come the same endpoints.
func (s *Source) Replace(next Snapshot) (changed bool, err error) {
	byService := map[types.NamespacedName][]ServicePort{}
	for _, p := range next.ServicePorts {
		byService[p.Name.NamespacedName] = append(byService[p.Name.NamespacedName], p)
	}
	services := make(map[types.NamespacedName]perFamily[[]*ServicePort], len(byService))
	var faults []error
	for _, name := range slices.SortedFunc(maps.Keys(byService), compareNames) {
		canonical, err := canonicalPorts(name, byService[name])
		services[name] = canonical
		faults = append(faults, err)
	}
	endpoints := make(map[ServicePortName]perFamily[[]Endpoint], len(next.Endpoints))
	for _, name := range slices.SortedFunc(maps.Keys(next.Endpoints), ServicePortName.Compare) {
		canonical, err := s.store.canonicalEndpoints(s.name, name, next.Endpoints[name])
		if endpoints[name] = canonical; err != nil {
			faults = append(faults, fmt.Errorf("endpoints of %s: %w", name, err))
		}
	}
	if err := errors.Join(faults...); err != nil {
		return false, fmt.Errorf("replace snapshot of source %q: %w", s.name, err)
	}
	return s.store.replace(s.name, services, endpoints), nil
}

// Synced says that all the Source has was given to it. For the tracker's own Source this
// is Tracker.Synced of InputServices and InputEndpointSlices, for others it is that of
// their SourceInput.
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
	for key, at := range s.homes {
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

// retain takes away what a Source has of all other Services, and the hand-built endpoints
// of all other service ports.
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

// synced notes that a Source is known.
func (s *store) synced(from string) {
	if from != "" {
		s.gate.known(SourceInput(from))
		return
	}
	s.gate.known(InputServices)
	s.gate.known(InputEndpointSlices)
}
