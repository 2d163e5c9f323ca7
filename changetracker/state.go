package changetracker

import (
	"iter"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/persist"
)

// State is what is to be proxied in one IP family, at one moment. It never
// changes, so it may be kept, and read by several goroutines; two States share
// what is the same in both. Callers must not write to what its methods return.
type State struct {
	family int
	node   Node
	snapshot
}

// Family is the IP family that the State describes.
func (s *State) Family() v1.IPFamily { return familyName(s.family) }

// Node is the tracker's own node. For tells what the State means for others.
func (s *State) Node() Node { return s.node }

// Len is the number of service ports.
func (s *State) Len() int { return s.servicePorts }

// Service returns a service port; ok is false when it is not proxied.
func (s *State) Service(name ServicePortName) (port *ServicePort, ok bool) {
	p := s.find(name)
	if p == nil || p.port == nil {
		return nil, false
	}
	return p.port, true
}

// Endpoints returns the endpoints of a service port, sorted by address and port,
// or nil when it has none or is not proxied. An EndpointChangeTracker on its own
// knows of no service ports, and has the endpoints of all.
func (s *State) Endpoints(name ServicePortName) []Endpoint {
	p := s.find(name)
	if p == nil {
		return nil
	}
	return slices.Clip(p.endpoints)
}

// All yields every service port, in no particular order.
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

// ServicePorts returns the names of the service ports of a Service, sorted.
func (s *State) ServicePorts(name types.NamespacedName) []ServicePortName {
	service, ok := s.services.Get(name)
	if !ok || service.servicePorts == 0 {
		return nil
	}
	names := make([]ServicePortName, 0, service.servicePorts)
	for _, p := range service.ports {
		if p.port != nil {
			names = append(names, p.name)
		}
	}
	return names
}

// portState is a port of a Service as a State shows it. Immutable.
type portState struct {
	name      ServicePortName
	port      *ServicePort // nil: not proxied, only endpoints are known
	merged    []Endpoint   // what slices say, sorted by address
	endpoints []Endpoint   // what became of merged, or the same list; sorted
}

func (p *portState) key() portKey { return portKey{port: p.name.Port, protocol: p.name.Protocol} }

// serviceState is a Service as a State shows it. Immutable.
type serviceState struct {
	ports        []*portState // sorted by name
	servicePorts int          // how many ports have a ServicePort
	healthPort   *ServicePort // the first one with a HealthCheckNodePort, or nil
}

// newServiceState returns nil when there is nothing to show.
func newServiceState(ports []*portState) *serviceState {
	if len(ports) == 0 {
		return nil
	}
	s := &serviceState{ports: ports}
	for _, p := range ports {
		if p.port == nil {
			continue
		}
		s.servicePorts++
		if s.healthPort == nil && p.port.HealthCheckNodePort != 0 {
			s.healthPort = p.port
		}
	}
	return s
}

// all are the ports, sorted by name.
func (s *serviceState) all() []*portState {
	if s == nil {
		return nil
	}
	return s.ports
}

// health is the port that has the Service's health check node port, or nil.
func (s *serviceState) health() *ServicePort {
	if s == nil {
		return nil
	}
	return s.healthPort
}

func (s *serviceState) find(key portKey) *portState {
	ports := s.all()
	i, found := slices.BinarySearchFunc(ports, key, func(p *portState, key portKey) int { return p.key().compare(key) })
	if !found {
		return nil
	}
	return ports[i]
}

// snapshot is the content of a State.
type snapshot struct {
	services       persist.Map[types.NamespacedName, *serviceState]
	index          *index
	indexEndpoints bool
	servicePorts   int
}

func newSnapshot(indexEndpoints bool) snapshot {
	return snapshot{
		services: persist.New[types.NamespacedName, *serviceState](),
		index:    newIndex(), indexEndpoints: indexEndpoints,
	}
}

func (s *snapshot) find(name ServicePortName) *portState {
	service, _ := s.services.Get(name.NamespacedName)
	return service.find(portKey{port: name.Port, protocol: name.Protocol})
}

// snapshotEditor makes the next snapshot.
type snapshotEditor struct {
	services     *persist.Editor[types.NamespacedName, *serviceState]
	index        indexEditor
	servicePorts int
}

func (s *snapshot) edit() *snapshotEditor {
	return &snapshotEditor{
		services:     s.services.Edit(),
		index:        indexEditor{version: s.index, endpoints: s.indexEndpoints},
		servicePorts: s.servicePorts,
	}
}

// put adds or replaces a Service, or takes it out when next is nil.
func (e *snapshotEditor) put(name types.NamespacedName, next *serviceState) {
	old, _ := e.services.Get(name)
	e.index.replace(old, next)
	if old != nil {
		e.servicePorts -= old.servicePorts
	}
	if next == nil {
		e.services.Delete(name)
		return
	}
	e.servicePorts += next.servicePorts
	e.services.Set(name, next)
}

func (e *snapshotEditor) snapshot() snapshot {
	return snapshot{
		services: e.services.Map(), index: e.index.freeze(), indexEndpoints: e.index.endpoints, servicePorts: e.servicePorts,
	}
}
