package counting

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// Sum adds up the counts of two engines that serve different connections.
func Sum(a, b proxier.Counts) proxier.Counts {
	sum := proxier.Counts{Since: a.Since}
	if sum.Since.IsZero() || !b.Since.IsZero() && b.Since.Before(sum.Since) {
		sum.Since = b.Since
	}
	ports := map[changetracker.ServicePortName]*port{}
	for _, counts := range []proxier.Counts{a, b} {
		for _, of := range counts.ServicePorts {
			p := ports[of.Name]
			if p == nil {
				p = &port{endpoints: map[netip.AddrPort]uint64{}}
				ports[of.Name] = p
			}
			p.gone += of.Connections
			for _, e := range of.Endpoints {
				p.gone -= e.Connections
				p.endpoints[e.Endpoint] += e.Connections
			}
		}
	}
	sum.ServicePorts = list(ports)
	return sum
}

// list returns the numbers, sorted.
func list(ports map[changetracker.ServicePortName]*port) []proxier.ServicePortCounts {
	all := make([]proxier.ServicePortCounts, 0, len(ports))
	for _, name := range slices.SortedFunc(maps.Keys(ports), changetracker.ServicePortName.Compare) {
		of := proxier.ServicePortCounts{Name: name, Connections: ports[name].gone}
		for endpoint, n := range ports[name].endpoints {
			of.Connections += n
			of.Endpoints = append(of.Endpoints, proxier.EndpointCounts{Endpoint: endpoint, Connections: n})
		}
		slices.SortFunc(of.Endpoints, func(a, b proxier.EndpointCounts) int { return a.Endpoint.Compare(b.Endpoint) })
		all = append(all, of)
	}
	return all
}
