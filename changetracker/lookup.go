package changetracker

import (
	"iter"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ByAddr yields the service ports that have an address and port as ClusterIP, external IP or
// load balancer IP, sorted by name. If there are several, desired.Resolved says which one gets
// it. Node ports are not included, because the addresses of the node belong to no Service: see
// ByNodePort. Like all methods By…, it costs O(log N) and the size of the result.
func (s *State) ByAddr(vip netip.AddrPort, protocol v1.Protocol) iter.Seq[ServicePortName] {
	return withProtocol(s.names(vipEntry, vip.Addr().Unmap(), vip.Port()), protocol)
}

// ByVIP is ByAddr for all ports and protocols. It yields the service ports in order of port
// and name.
func (s *State) ByVIP(vip netip.Addr) iter.Seq[ServicePortName] {
	return func(yield func(ServicePortName) bool) {
		for e := range s.entries(vipEntry, vip.Unmap(), 0) {
			if !yield(*e.name) {
				return
			}
		}
	}
}

// ByNodePort yields the service ports that have a node port, sorted by name.
func (s *State) ByNodePort(port uint16, protocol v1.Protocol) iter.Seq[ServicePortName] {
	return withProtocol(s.names(nodePortEntry, netip.Addr{}, port), protocol)
}

// ByHealthCheckNodePort yields the Services that have a health check node port, sorted by
// name.
func (s *State) ByHealthCheckNodePort(port uint16) iter.Seq[types.NamespacedName] {
	return func(yield func(types.NamespacedName) bool) {
		for name := range s.names(healthPortEntry, netip.Addr{}, port) {
			if !yield(name.NamespacedName) {
				return
			}
		}
	}
}

// ByEndpoint yields the service ports that have an endpoint with that address, whatever its
// port and conditions, sorted by name. Without Options.IndexEndpoints it reads the endpoints
// of all service ports.
func (s *State) ByEndpoint(addr netip.Addr) iter.Seq[ServicePortName] {
	addr = addr.Unmap()
	if s.indexEndpoints {
		return s.names(endpointEntry, addr, 0)
	}
	return func(yield func(ServicePortName) bool) {
		var names []ServicePortName
		for _, service := range s.services.All() {
			for _, p := range service.ports {
				if hasAddr(&p.endpoints, addr) {
					names = append(names, p.name)
				}
			}
		}
		slices.SortFunc(names, ServicePortName.Compare)
		slices.Values(names)(yield)
	}
}

func withProtocol(names iter.Seq[ServicePortName], protocol v1.Protocol) iter.Seq[ServicePortName] {
	return func(yield func(ServicePortName) bool) {
		for name := range names {
			if name.Protocol == protocol && !yield(name) {
				return
			}
		}
	}
}

// HealthCheckNodePorts returns the health check node port of each Service that has one. It
// costs the size of the result.
func (s *State) HealthCheckNodePorts() map[types.NamespacedName]uint16 {
	ports := map[types.NamespacedName]uint16{}
	for e := range s.entries(healthPortEntry, netip.Addr{}, 0) {
		ports[e.name.NamespacedName] = e.port
	}
	return ports
}

// HealthCheckNodePort returns the health check node port of a Service, or 0.
func (s *State) HealthCheckNodePort(name types.NamespacedName) uint16 {
	service, _ := s.services.Get(name)
	if p := service.health(); p != nil {
		return p.HealthCheckNodePort
	}
	return 0
}
