package changetracker

import (
	"iter"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// State is what a proxy handles in one IP family at one moment. It never changes, so several
// goroutines may keep and read it. Two States share memory where they are equal. Callers must
// not change what its methods return.
type State struct {
	family int
	node   Node
	snapshot
}

// Family returns the IP family.
func (s *State) Family() v1.IPFamily { return familyName(s.family) }

// Node returns the tracker's own node. For returns the view of any node.
func (s *State) Node() Node { return s.node }

// Len returns the number of service ports.
func (s *State) Len() int { return s.servicePorts }

// Service returns a service port. ok is false if it is not proxied.
func (s *State) Service(name ServicePortName) (port *ServicePort, ok bool) {
	p := s.find(name)
	if p == nil || p.port == nil {
		return nil, false
	}
	return p.port, true
}

// Endpoints returns the endpoints of a service port, sorted by address and port, or nil if it
// has none or is not proxied. The first call for a list of more than 128 copies it. An EndpointChangeTracker on its own has no service ports and
// returns the endpoints of all.
func (s *State) Endpoints(name ServicePortName) []Endpoint {
	p := s.find(name)
	if p == nil {
		return nil
	}
	return p.endpoints.Slice()
}

// Merged returns the endpoints of a service port as slices and Endpoints.Set say, before Overrides and
// Options.EditEndpoints.
func (s *State) Merged(name ServicePortName) []Endpoint {
	p := s.find(name)
	if p == nil {
		return nil
	}
	return p.merged.Slice()
}

// EachEndpoint calls visit with each endpoint that Endpoints returns, in order, and copies nothing.
func (s *State) EachEndpoint(name ServicePortName, visit func(*Endpoint)) {
	p := s.find(name)
	if p == nil {
		return
	}
	for part := range p.endpoints.Parts {
		for i := range part {
			visit(&part[i])
		}
	}
}

// Endpoint returns an endpoint of a service port as Endpoints lists it; ok is false if there is none. It
// costs O(log N), and the endpoint must not be changed.
func (s *State) Endpoint(name ServicePortName, addr netip.AddrPort) (e *Endpoint, ok bool) {
	p := s.find(name)
	if p == nil {
		return nil, false
	}
	e = p.endpoints.Find(func(e *Endpoint) bool { return e.Addr.Compare(addr) < 0 })
	return e, e != nil && e.Addr == addr
}

// Services yields the Services that have service ports or, with an EndpointChangeTracker on its own,
// endpoints, in no particular order.
func (s *State) Services() iter.Seq[types.NamespacedName] {
	return func(yield func(types.NamespacedName) bool) {
		for name := range s.services.All() {
			if !yield(name) {
				return
			}
		}
	}
}

// Nodes returns the nodes that have ready endpoints of a Service, of the groups that serve, sorted. A load balancer that sends to
// node ports with traffic policy Local sends there.
func (s *State) Nodes(service types.NamespacedName) []string {
	nodes := map[string]bool{}
	for _, port := range s.ServicePorts(service) {
		serving := s.find(port).serving()
		s.EachEndpoint(port, func(e *Endpoint) {
			if e.Ready && e.Priority == serving && e.Node != "" {
				nodes[e.Node] = true
			}
		})
	}
	return slices.Sorted(maps.Keys(nodes))
}

// All yields every service port, in no particular order. An EndpointChangeTracker on its own has none:
// see Services.
func (s *State) All() iter.Seq2[ServicePortName, *ServicePort] {
	return func(yield func(ServicePortName, *ServicePort) bool) {
		for _, service := range s.services.All() {
			for _, p := range service.ports {
				if p.port != nil && !yield(p.name, p.port) {
					return
				}
			}
		}
	}
}

// Changed yields the names of the Services whose service ports or endpoints differ between two
// States, in no particular order. Between States of one tracker it costs about what has
// changed; otherwise it yields all Services of both, some of them twice. since may be nil.
func (s *State) Changed(since *State) iter.Seq[types.NamespacedName] {
	if since == nil {
		since = &State{snapshot: newSnapshot(false)}
	}
	return s.services.Changed(since.services, func(a, b *serviceState) bool { return a == b })
}

// ServicePorts returns the names of the service ports of a Service, sorted. Those of an
// EndpointChangeTracker on its own have endpoints only.
func (s *State) ServicePorts(name types.NamespacedName) []ServicePortName {
	service, ok := s.services.Get(name)
	if !ok {
		return nil
	}
	names := make([]ServicePortName, len(service.ports))
	for i, p := range service.ports {
		names[i] = p.name
	}
	return names
}
