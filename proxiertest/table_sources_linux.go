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
			name: "PKT-42/second_address", rule: "As a VIP, the node itself is let in only if its primary address is in the ranges.",
			setup:    setupTwoAddresses,
			services: []service{{external: true, vip: localVIP, options: []ServiceOption{secondOnly}, endpoints: ready(pod1, remote0)}},
			probes: slices.Concat(
				every([]place{node}, balancer, answeredBy(pod1, remote0)),
				every([]place{nodeAsVIP, nodeMain}, balancer, isDropped())),
		},
		{
			name: "PKT-40", rule: "Sources within the ranges reach the load balancer's endpoints.",
			services: guarded(clientOnly),
			probes:   every([]place{client}, balancer, masqueradedTo(pod1, remote0)),
		},
		{
			name: "PKT-40/local", rule: "Sources within the ranges keep their address under policy Local.",
			services: guarded(clientOnly, ExternalPolicyLocal()),
			probes:   every([]place{client}, balancer, keptBy(pod1)),
		},
		{
			name: "PKT-41", rule: "Sources outside the ranges are dropped, pods too.",
			services: guarded(clientOnly),
			probes:   every([]place{otherClient, pod0, remote0}, balancer, isDropped()),
		},
		{
			name: "PKT-41/local", rule: "Sources outside the ranges are dropped under policy Local, pods too.",
			services: guarded(clientOnly, ExternalPolicyLocal()),
			probes:   every([]place{otherClient, pod0}, balancer, isDropped()),
		},
		{
			name: "PKT-42", rule: "The node itself is let in by its address, and as any of the Service's own VIPs.",
			services: []service{{external: true, vip: localVIP, options: []ServiceOption{nodeOnly}, endpoints: ready(pod1, remote0)}},
			probes: slices.Concat(
				every([]place{nodeMain}, balancer, answeredBy(pod1, remote0)),
				every([]place{nodeAsVIP}, balancer, masqueradedTo(pod1, remote0))),
		},
		{
			name: "PKT-43", rule: "The node itself is dropped from an address outside the ranges.",
			services: guarded(nodeOnly),
			probes:   every([]place{node}, balancer, isDropped()),
		},
	}
}

// openSourceRangeScenarios are about loadBalancerSourceRanges that do not keep
// everybody out whom they do not name.
func openSourceRangeScenarios() []scenario {
	guarded := func(ranges ...string) []service {
		return []service{{external: true, options: []ServiceOption{SourceRanges(ranges...)}, endpoints: ready(pod1, remote0)}}
	}
	balancer := []target{loadBalancer}
	everybody := []place{client, otherClient, pod0}
	return []scenario{
		{
			name: "PKT-44", rule: "The ranges do not guard node ports, external IPs and ClusterIPs.",
			services: guarded("198.51.100.2/32", "2001:db8:c::2/128"),
			probes: slices.Concat(
				every([]place{otherClient, pod0, node}, []target{nodePort, externalIP}, masqueradedTo(pod1, remote0)),
				every([]place{otherClient}, []target{clusterIP}, masqueradedTo(pod1, remote0))),
		},
		{
			name: "PKT-45", rule: "A range of everything lets everybody in.",
			services: guarded("198.51.100.2/32", "0.0.0.0/0", "2001:db8:c::2/128", "::/0"),
			probes:   every([]place{otherClient, pod0, node}, balancer, masqueradedTo(pod1, remote0)),
		},
		{
			name: "PKT-45/sloppy", rule: "Spaces around ranges are trimmed, and what is no range is ignored.",
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
			name: "PKT-46/malformed", rule: "Ranges none of which is one do not guard.",
			services: guarded("everybody", "10.0.0.0/99"),
			probes:   every(everybody, balancer, masqueradedTo(pod1, remote0)),
		},
		{
			name: "PKT-46/strict", rule: "With StrictSourceRanges they let nobody in.",
			setup:    setupStrictRanges,
			services: guarded("everybody", "10.0.0.0/99"),
			probes:   every(everybody, balancer, isDropped()),
		},
		{
			name: "PKT-46/IPv4_ranges", rule: "Ranges of the other family only do not guard this one.",
			services: guarded("198.51.100.2/32"),
			families: []v1.IPFamily{v1.IPv6Protocol},
			probes:   every(everybody, balancer, masqueradedTo(pod1, remote0)),
		},
		{
			name: "PKT-46/IPv6_ranges", rule: "Ranges of the other family only do not guard this one.",
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
		name: "PKT-47", rule: "Sources outside the ranges are dropped also when there are no endpoints; the others are rejected.",
		services: []service{{external: true, options: []ServiceOption{SourceRanges("198.51.100.2/32", "2001:db8:c::2/128")}}},
		probes: slices.Concat(
			every([]place{otherClient, pod0}, []target{loadBalancer}, outside),
			every([]place{client}, []target{loadBalancer}, isRejected())),
	}}
}

// conditionScenarios are about endpoints that come and go.
func conditionScenarios(f Features) []scenario {
	inside := remote0
	if f.LocalPolicyBindsAll {
		inside = pod1
	}
	local := []ServiceOption{ExternalPolicyLocal()}
	return []scenario{
		{
			name: "PKT-70", rule: "Ready endpoints are used, and while there are any, no others.",
			services: []service{{external: true, endpoints: slices.Concat(ready(pod1, remote0), terminating(pod0), notServing(remote1))}},
			probes: slices.Concat(
				every([]place{pod2}, []target{clusterIP}, keptBy(pod1, remote0)),
				every([]place{client}, external(), masqueradedTo(pod1, remote0))),
		},
		{
			name: "PKT-71", rule: "Without ready endpoints, terminating ones that still serve are used.",
			services: []service{{external: true, endpoints: slices.Concat(terminating(pod1, remote0), notServing(pod0))}},
			probes: slices.Concat(
				every([]place{pod2}, []target{clusterIP}, keptBy(pod1, remote0)),
				every([]place{client}, external(), masqueradedTo(pod1, remote0))),
		},
		{
			name: "PKT-71/scopes", rule: "Terminating endpoints are resorted to in each scope by itself.",
			services: []service{{external: true, options: local, endpoints: slices.Concat(terminating(pod1), ready(remote0))}},
			probes: slices.Concat(
				every([]place{client}, external(), keptBy(pod1)),
				every([]place{pod0}, external(), keptBy(inside)),
				every([]place{pod0}, []target{clusterIP}, keptBy(remote0))),
		},
		{
			name: "PKT-72", rule: "Endpoints that do not serve count for nothing.",
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
