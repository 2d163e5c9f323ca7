package counting

import (
	"cmp"
	"maps"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Sum adds up the counts of two engines that serve different connections, or different counts of
// one engine.
func Sum(a, b connection.Counts) connection.Counts {
	sum := connection.Counts{
		Since: a.Since, Connections: a.Connections || b.Connections, Traffic: a.Traffic || b.Traffic, TrafficProblem: cmp.Or(a.TrafficProblem, b.TrafficProblem),
		TrafficLosses: a.TrafficLosses + b.TrafficLosses,
	}
	if sum.Since.IsZero() || !b.Since.IsZero() && b.Since.Before(sum.Since) {
		sum.Since = b.Since
	}
	ports := map[changetracker.ServicePortName]*port{}
	for _, counts := range []connection.Counts{a, b} {
		for _, of := range counts.ServicePorts {
			p := ports[of.Name]
			if p == nil {
				p = newPort()
				ports[of.Name] = p
			}
			p.gone = p.gone.plus(numbers{of.Connections, of.Traffic, of.Refused})
			for _, e := range of.Endpoints {
				n := numbers{connections: e.Connections, traffic: e.Traffic}
				p.gone = p.gone.minus(n)
				p.add(e.Endpoint, n)
			}
		}
	}
	sum.ServicePorts = list(ports)
	return sum
}

// list returns the numbers, sorted.
func list(ports map[changetracker.ServicePortName]*port) []connection.ServicePortCounts {
	all := make([]connection.ServicePortCounts, 0, len(ports))
	for _, name := range slices.SortedFunc(maps.Keys(ports), changetracker.ServicePortName.Compare) {
		p, sum := ports[name], ports[name].gone
		of := connection.ServicePortCounts{Name: name}
		for endpoint, n := range p.endpoints {
			sum = sum.plus(n)
			of.Endpoints = append(of.Endpoints, connection.EndpointCounts{Endpoint: endpoint, Connections: n.connections, Traffic: n.traffic})
		}
		of.Connections, of.Traffic, of.Refused = sum.connections, sum.traffic, sum.refused
		slices.SortFunc(of.Endpoints, func(a, b connection.EndpointCounts) int { return a.Endpoint.Compare(b.Endpoint) })
		all = append(all, of)
	}
	return all
}
