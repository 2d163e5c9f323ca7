package changetracker

import "slices"

// portState is a port of a Service as a State shows it. Immutable.
type portState struct {
	name      ServicePortName
	port      *ServicePort // nil: not proxied, only endpoints are known
	merged    []Endpoint   // what slices say, sorted by address
	endpoints []Endpoint   // what became of merged, or the same list; sorted
}

func (p *portState) key() portKey { return p.name.key() }

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
