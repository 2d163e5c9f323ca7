package proxiertest

import (
	"slices"

	v1 "k8s.io/api/core/v1"
)

// sourceRangeScenarios are about loadBalancerSourceRanges. The client's first
// address is in the ranges, its second one is not.
func sourceRangeScenarios() []scenario {
	clientOnly := SourceRanges("198.51.100.2/32", "2001:db8:c::2/128")
	nodeOnly := SourceRanges("192.0.2.10/32", "2001:db8:2::10/128")
	guarded := func(opts ...ServiceOption) []service {
		return []service{{external: true, options: opts, endpoints: ready(pod1, remote0)}}
	}
	secondOnly := SourceRanges("192.0.2.20/32", "2001:db8:2::20/128")
	balancer := []target{loadBalancer}
	return []scenario{
		{
			name: "PKT-42/second_address", rule: "A packet of the node from a VIP is accepted only if the node's primary address is in the ranges.",
			setup:    setupTwoAddresses,
			services: []service{{external: true, vip: localVIP, options: []ServiceOption{secondOnly}, endpoints: ready(pod1, remote0)}},
			probes: slices.Concat(
				every([]place{node}, balancer, answeredBy(pod1, remote0)),
				every([]place{nodeAsVIP, nodeMain}, balancer, isDropped())),
		},
		{
			name: "PKT-40", rule: "Clients within the source ranges reach the endpoints of a load balancer IP.",
			services: guarded(clientOnly),
			probes:   every([]place{client}, balancer, masqueradedTo(pod1, remote0)),
		},
		{
			name: "PKT-40/local", rule: "Clients within the source ranges keep their source under externalTrafficPolicy Local.",
			services: guarded(clientOnly, ExternalPolicyLocal()),
			probes:   every([]place{client}, balancer, keptBy(pod1)),
		},
		{
			name: "PKT-41", rule: "Packets from outside the source ranges are dropped, also those of pods.",
			services: guarded(clientOnly),
			probes:   every([]place{otherClient, pod0, remote0}, balancer, isDropped()),
		},
		{
			name: "PKT-41/local", rule: "Packets from outside the source ranges are dropped under externalTrafficPolicy Local, also those of pods.",
			services: guarded(clientOnly, ExternalPolicyLocal()),
			probes:   every([]place{otherClient, pod0}, balancer, isDropped()),
		},
		{
			name: "PKT-42", rule: "If its address is in the ranges, the node is accepted from it, and from any VIP of the Service.",
			services: []service{{external: true, vip: localVIP, options: []ServiceOption{nodeOnly}, endpoints: ready(pod1, remote0)}},
			probes: slices.Concat(
				every([]place{nodeMain}, balancer, answeredBy(pod1, remote0)),
				every([]place{nodeAsVIP}, balancer, masqueradedTo(pod1, remote0))),
		},
		{
			name: "PKT-43", rule: "The node is dropped if its address is outside the ranges.",
			services: guarded(nodeOnly),
			probes:   every([]place{node}, balancer, isDropped()),
		},
	}
}

// openSourceRangeScenarios are about loadBalancerSourceRanges that accept other clients.
func openSourceRangeScenarios() []scenario {
	guarded := func(ranges ...string) []service {
		return []service{{external: true, options: []ServiceOption{SourceRanges(ranges...)}, endpoints: ready(pod1, remote0)}}
	}
	balancer := []target{loadBalancer}
	everybody := []place{client, otherClient, pod0}
	return []scenario{
		{
			name: "PKT-44", rule: "Source ranges do not apply to node ports, external IPs and ClusterIPs.",
			services: guarded("198.51.100.2/32", "2001:db8:c::2/128"),
			probes: slices.Concat(
				every([]place{otherClient, pod0, node}, []target{nodePort, externalIP}, masqueradedTo(pod1, remote0)),
				every([]place{otherClient}, []target{clusterIP}, masqueradedTo(pod1, remote0))),
		},
		{
			name: "PKT-45", rule: "A range with prefix length 0 accepts all clients.",
			services: guarded("198.51.100.2/32", "0.0.0.0/0", "2001:db8:c::2/128", "::/0"),
			probes:   every([]place{otherClient, pod0, node}, balancer, masqueradedTo(pod1, remote0)),
		},
		{
			name: "PKT-45/sloppy", rule: "Spaces around ranges are trimmed, and malformed ranges are ignored.",
			services: guarded(" 198.51.100.2/32 ", "", "everybody", "2001:db8:c::2/128\t"),
			probes: slices.Concat(
				every([]place{client}, balancer, masqueradedTo(pod1, remote0)),
				every([]place{otherClient}, balancer, isDropped())),
		},
		{
			name: "PKT-40/address", rule: "A range without a length is one address.",
			services: guarded("198.51.100.2", "2001:db8:c::2"),
			probes: slices.Concat(
				every([]place{client}, balancer, masqueradedTo(pod1, remote0)),
				every([]place{otherClient}, balancer, isDropped())),
		},
		{
			name: "PKT-46/malformed", rule: "If all ranges are malformed, all clients are accepted.",
			services: guarded("everybody", "10.0.0.0/99"),
			probes:   every(everybody, balancer, masqueradedTo(pod1, remote0)),
		},
		{
			name: "PKT-46/strict", rule: "With StrictSourceRanges, no client is accepted then.",
			setup:    setupStrictRanges,
			services: guarded("everybody", "10.0.0.0/99"),
			probes:   every(everybody, balancer, isDropped()),
		},
		{
			name: "PKT-46/IPv4_ranges", rule: "If all ranges are of the other IP family, all clients are accepted.",
			services: guarded("198.51.100.2/32"),
			families: []v1.IPFamily{v1.IPv6Protocol},
			probes:   every(everybody, balancer, masqueradedTo(pod1, remote0)),
		},
		{
			name: "PKT-46/IPv6_ranges", rule: "If all ranges are of the other IP family, all clients are accepted.",
			services: guarded("2001:db8:c::2/128"),
			families: []v1.IPFamily{v1.IPv4Protocol},
			probes:   every(everybody, balancer, masqueradedTo(pod1, remote0)),
		},
	}
}

func emptySourceRangeScenarios(f Features) []scenario {
	outside := isDropped()
	if f.RangesNeedEndpoints {
		outside = isRejected()
	}
	return []scenario{{
		name: "PKT-47", rule: "Without endpoints, clients outside the ranges are dropped, and the others are rejected.",
		services: []service{{external: true, options: []ServiceOption{SourceRanges("198.51.100.2/32", "2001:db8:c::2/128")}}},
		probes: slices.Concat(
			every([]place{otherClient, pod0}, []target{loadBalancer}, outside),
			every([]place{client}, []target{loadBalancer}, isRejected())),
	}}
}

// conditionScenarios are about the conditions of endpoints.
func conditionScenarios(f Features) []scenario {
	inside := remote0
	if f.LocalPolicyBindsAll {
		inside = pod1
	}
	local := []ServiceOption{ExternalPolicyLocal()}
	return []scenario{
		{
			name: "PKT-70", rule: "If there are ready endpoints, they alone are used.",
			services: []service{{external: true, endpoints: slices.Concat(ready(pod1, remote0), terminating(pod0), notServing(remote1))}},
			probes: slices.Concat(
				every([]place{pod2}, []target{clusterIP}, keptBy(pod1, remote0)),
				every([]place{client}, external(), masqueradedTo(pod1, remote0))),
		},
		{
			name: "PKT-71", rule: "Without ready endpoints, terminating ones that serve are used.",
			services: []service{{external: true, endpoints: slices.Concat(terminating(pod1, remote0), notServing(pod0))}},
			probes: slices.Concat(
				every([]place{pod2}, []target{clusterIP}, keptBy(pod1, remote0)),
				every([]place{client}, external(), masqueradedTo(pod1, remote0))),
		},
		{
			name: "PKT-71/scopes", rule: "Terminating endpoints are used in each scope independently.",
			services: []service{{external: true, options: local, endpoints: slices.Concat(terminating(pod1), ready(remote0))}},
			probes: slices.Concat(
				every([]place{client}, external(), keptBy(pod1)),
				every([]place{pod0}, external(), keptBy(inside)),
				every([]place{pod0}, []target{clusterIP}, keptBy(remote0))),
		},
		{
			name: "PKT-72", rule: "Endpoints that do not serve are not used.",
			services: []service{
				{external: true, endpoints: notServing(pod1, remote0)},
				{external: true, options: local, endpoints: notServing(pod1, remote0)},
			},
			probes: slices.Concat(
				every([]place{pod0, client, node}, []target{clusterIP, nodePort, loadBalancer}, isRejected()),
				toSecond(every([]place{client}, external(), isRejected()))),
		},
	}
}
