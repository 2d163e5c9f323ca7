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
	ranges := func(cidrs ...string) []service { return guarded(SourceRanges(cidrs...)) }
	secondOnly := SourceRanges("192.0.2.20/32", "2001:db8:2::20/128")
	balancer, everybody := []target{loadBalancer}, []place{client, otherClient, pod0}
	return []scenario{
		packets("PKT-42/second_address", "A packet of the node from a VIP is accepted only if the node's primary address is in the ranges.",
			setupTwoAddresses, []service{{external: true, vip: localVIP, options: []ServiceOption{secondOnly}, endpoints: ready(pod1, remote0)}},
			every([]place{node}, balancer, answeredBy(pod1, remote0)),
			every([]place{nodeAsVIP, nodeMain}, balancer, isDropped())),
		packets("PKT-40", "Clients within the source ranges reach the endpoints of a load balancer IP.", setupDefault, guarded(clientOnly),
			every([]place{client}, balancer, masqueradedTo(pod1, remote0))),
		packets("PKT-40/local", "Clients within the source ranges keep their source under externalTrafficPolicy Local.",
			setupDefault, guarded(clientOnly, ExternalPolicyLocal()), every([]place{client}, balancer, keptBy(pod1))),
		packets("PKT-41", "Packets from outside the source ranges are dropped, also those of pods.", setupDefault, guarded(clientOnly),
			every([]place{otherClient, pod0, remote0}, balancer, isDropped())),
		packets("PKT-41/local", "Packets from outside the source ranges are dropped under externalTrafficPolicy Local, also those of pods.",
			setupDefault, guarded(clientOnly, ExternalPolicyLocal()), every([]place{otherClient, pod0}, balancer, isDropped())),
		packets("PKT-42", "If its address is in the ranges, the node is accepted from it, and from any VIP of the Service.",
			setupDefault, []service{{external: true, vip: localVIP, options: []ServiceOption{nodeOnly}, endpoints: ready(pod1, remote0)}},
			every([]place{nodeMain}, balancer, answeredBy(pod1, remote0)),
			every([]place{nodeAsVIP}, balancer, masqueradedTo(pod1, remote0))),
		packets("PKT-43", "The node is dropped if its address is outside the ranges.", setupDefault, guarded(nodeOnly),
			every([]place{node}, balancer, isDropped())),
		packets("PKT-41/denied", "Packets of denied sources are dropped, and those of all others are accepted.", setupDefault,
			guarded(annotated(annotationDenied, "198.51.100.2/32 2001:db8:c::2/128 10.244.1.0/24 fd00:10:244:1::/64")),
			every([]place{client, pod0}, balancer, isDropped()),
			every([]place{otherClient, remote0, node}, balancer, masqueradedTo(pod1, remote0))),
		packets("PKT-41/denied_in_ranges", "A denied source is dropped, although it is within the source ranges.", setupDefault,
			guarded(SourceRanges("198.51.100.0/24", "2001:db8:c::/64"), annotated(annotationDenied, "198.51.100.2/32 2001:db8:c::2/128")),
			every([]place{client, pod0, node}, balancer, isDropped()),
			every([]place{otherClient}, balancer, masqueradedTo(pod1, remote0))),
		packets("PKT-44", "Source ranges do not apply to node ports, external IPs and ClusterIPs.",
			setupDefault, ranges("198.51.100.2/32", "2001:db8:c::2/128"),
			every([]place{otherClient, pod0, node}, []target{nodePort, externalIP}, masqueradedTo(pod1, remote0)),
			every([]place{otherClient}, []target{clusterIP}, masqueradedTo(pod1, remote0))),
		packets("PKT-45", "A range with prefix length 0 accepts all clients.",
			setupDefault, ranges("198.51.100.2/32", "0.0.0.0/0", "2001:db8:c::2/128", "::/0"),
			every([]place{otherClient, pod0, node}, balancer, masqueradedTo(pod1, remote0))),
		packets("PKT-45/sloppy", "Spaces around ranges are trimmed, and malformed ranges are ignored.",
			setupDefault, ranges(" 198.51.100.2/32 ", "", "everybody", "2001:db8:c::2/128\t"),
			every([]place{client}, balancer, masqueradedTo(pod1, remote0)),
			every([]place{otherClient}, balancer, isDropped())),
		packets("PKT-40/address", "A range without a length is one address.", setupDefault, ranges("198.51.100.2", "2001:db8:c::2"),
			every([]place{client}, balancer, masqueradedTo(pod1, remote0)),
			every([]place{otherClient}, balancer, isDropped())),
		packets("PKT-46/malformed", "If all ranges are malformed, all clients are accepted.",
			setupDefault, ranges("everybody", "10.0.0.0/99"), every(everybody, balancer, masqueradedTo(pod1, remote0))),
		packets("PKT-46/strict", "With StrictSourceRanges, no client is accepted then.",
			setupStrictRanges, ranges("everybody", "10.0.0.0/99"), every(everybody, balancer, isDropped())),
		packets("PKT-46/IPv4_ranges", "If all ranges are of the other IP family, all clients are accepted.",
			setupDefault, ranges("198.51.100.2/32"), every(everybody, balancer, masqueradedTo(pod1, remote0))).in(v1.IPv6Protocol),
		packets("PKT-46/IPv6_ranges", "If all ranges are of the other IP family, all clients are accepted.",
			setupDefault, ranges("2001:db8:c::2/128"), every(everybody, balancer, masqueradedTo(pod1, remote0))).in(v1.IPv4Protocol),
	}
}

// annotationDenied has ServicePort.DeniedSources.
const annotationDenied = "proxiertest/denied-sources"

func emptySourceRangeScenarios(f Features) []scenario {
	outside := isDropped()
	if f.RangesNeedEndpoints {
		outside = isRejected()
	}
	return []scenario{packets("PKT-47", "Without endpoints, clients outside the ranges are dropped, and the others are rejected.",
		setupDefault, []service{{external: true, options: []ServiceOption{SourceRanges("198.51.100.2/32", "2001:db8:c::2/128")}}},
		every([]place{otherClient, pod0}, []target{loadBalancer}, outside),
		every([]place{client}, []target{loadBalancer}, isRejected()))}
}

// conditionScenarios are about the conditions of endpoints.
func conditionScenarios(f Features) []scenario {
	inside := remote0
	if f.LocalPolicyBindsAll {
		inside = pod1
	}
	local := []ServiceOption{ExternalPolicyLocal()}
	return []scenario{
		packets("PKT-70", "If there are ready endpoints, they alone are used.",
			setupDefault, []service{{external: true, endpoints: slices.Concat(ready(pod1, remote0), terminating(pod0), notServing(remote1))}},
			every([]place{pod2}, []target{clusterIP}, keptBy(pod1, remote0)),
			every([]place{client}, external(), masqueradedTo(pod1, remote0))),
		packets("PKT-71", "Without ready endpoints, terminating ones that serve are used.",
			setupDefault, []service{{external: true, endpoints: slices.Concat(terminating(pod1, remote0), notServing(pod0))}},
			every([]place{pod2}, []target{clusterIP}, keptBy(pod1, remote0)),
			every([]place{client}, external(), masqueradedTo(pod1, remote0))),
		packets("PKT-71/scopes", "Terminating endpoints are used in each scope independently.",
			setupDefault, []service{{external: true, options: local, endpoints: slices.Concat(terminating(pod1), ready(remote0))}},
			every([]place{client}, external(), keptBy(pod1)),
			every([]place{pod0}, external(), keptBy(inside)),
			every([]place{pod0}, []target{clusterIP}, keptBy(remote0))),
		packets("PKT-72", "Endpoints that do not serve are not used.",
			setupDefault, []service{
				{external: true, endpoints: notServing(pod1, remote0)},
				{external: true, options: local, endpoints: notServing(pod1, remote0)},
			},
			every([]place{pod0, client, node}, []target{clusterIP, nodePort, loadBalancer}, isRejected()),
			toSecond(every([]place{client}, external(), isRejected()))),
	}
}
