package changetracker

import (
	"slices"

	"github.com/serviceplane/serviceplane/internal/sorted"
)

// portState is a port of a Service in a State. It is immutable.
type portState struct {
	name      ServicePortName
	port      *ServicePort // nil: not proxied, there are only endpoints
	merged    endpointList // according to slices
	aside     int          // how many more there are than the port may have
	endpoints endpointList // after overrides and hooks, or the same list
}

// endpointList is sorted by address.
type endpointList = sorted.List[Endpoint]

// serving returns the Priority of the group that serves.
func (p *portState) serving() uint8 {
	var s summary
	var f Failover
	if p.port != nil {
		f = p.port.Failover
	}
	for e := range p.endpoints.All {
		s.count(e, &Node{}, 1)
	}
	return s.serving(f).priority
}

func (p *portState) key() portKey { return p.name.key() }

// serviceState is a Service in a State. It is immutable.
type serviceState struct {
	ports        []*portState // sorted by name
	servicePorts int          // how many ports have a ServicePort
	healthPort   *ServicePort // the first one with a HealthCheckNodePort, or nil
}

// newServiceState returns nil if there are no ports.
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

// all returns the ports, sorted by name.
func (s *serviceState) all() []*portState {
	if s == nil {
		return nil
	}
	return s.ports
}

// health returns the port that has the health check node port of the Service, or nil.
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
