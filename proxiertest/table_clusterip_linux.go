package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// clusterIPScenarios are about masquerading of packets to a ClusterIP.
func clusterIPScenarios() []scenario {
	services := []service{{endpoints: ready(pod1, remote0)}}
	local := []service{{endpoints: ready(pod1, pod2)}} // their answers to remote pods go through the node
	toVIP := []target{clusterIP}
	// Under externalTrafficPolicy Local, pods keep their source to all addresses.
	named := func(node string) []service {
		endpoints := append(ready(remote0), endpoint{at: pod0, node: node})
		return []service{{external: true, options: []ServiceOption{ExternalPolicyLocal()}, endpoints: endpoints}}
	}
	toItself := every([]place{pod0}, append(external(), clusterIP), keptBy(pod0, remote0))
	return []scenario{
		packets("PKT-01", "A pod reaches every endpoint of a ClusterIP and keeps its source.", setupDefault, services,
			every([]place{pod0}, toVIP, keptBy(pod1, remote0))),
		packets("PKT-01/masquerade_all", "masqueradeAll masquerades everybody.", setupMasqueradeAll, services,
			every([]place{pod0, node, client}, toVIP, masqueradedTo(pod1, remote0))),
		packets("PKT-01/interface_prefix", "Pods are detected by the prefix of their interfaces' names.", setupInterfaces, services,
			every([]place{pod0, pod2}, toVIP, keptBy(pod1, remote0)),
			every([]place{node, client}, toVIP, masqueradedTo(pod1, remote0))),
		packets("PKT-01/interface", "Pods are detected by the name of their one interface.", setupInterface, services,
			every([]place{pod0}, toVIP, keptBy(pod1, remote0)),
			every([]place{pod2, node, client}, toVIP, masqueradedTo(pod1, remote0))),
		packets("PKT-02", "A pod that is chosen for its own connection is masqueraded, and not when another one is.", setupDefault,
			[]service{{endpoints: ready(pod0, pod1, remote0)}},
			every([]place{pod0}, toVIP, keptBy(pod0, pod1, remote0))),
		packets("PKT-02/no_detector", "A hairpin connection is masqueraded also without a way to tell pods.", setupNoDetector,
			[]service{{endpoints: ready(pod0, remote0)}},
			every([]place{pod0}, toVIP, keptBy(pod0, remote0))),
		packets("PKT-02/no_node_name", "An endpoint whose slice names no node can reach itself.", setupNoPodCIDRs, named(nameless), toItself),
		packets("PKT-02/upper_case", "An endpoint whose node is spelled in upper case can reach itself.", setupNoPodCIDRs, named("NODE"), toItself),
		packets("PKT-02/domain_name", "An endpoint whose node has a domain in its slice can reach itself.", setupNoPodCIDRs, named("node.example.com"), toItself),
		packets("PKT-02/wrong_node", "An endpoint in the node's own range can reach itself, whatever node its slice names.", setupDefault, named("elsewhere"), toItself),
		packets("PKT-03", "The node's own connections to a ClusterIP are masqueraded.", setupDefault, services,
			every([]place{node}, toVIP, masqueradedTo(pod1, remote0))),
		packets("PKT-04", "Without a way to tell pods, the node's own connections keep their source.", setupNoDetector, services,
			every([]place{node}, toVIP, keptBy(pod1, remote0))),
		packets("PKT-05", "A host outside the cluster is masqueraded on its way to a ClusterIP.", setupDefault, services,
			every([]place{client}, toVIP, masqueradedTo(pod1, remote0))),
		packets("PKT-05/no_detector", "Without a way to tell pods, a host outside the cluster keeps its source.", setupNoDetector, services,
			every([]place{client}, toVIP, keptBy(pod1, remote0))),
		packets("PKT-06", "A pod of another node keeps its source where pods are detected by the cluster's ranges.", setupDefault, local,
			every([]place{remote0}, toVIP, keptBy(pod1, pod2))),
		packets("PKT-06/node_pod_CIDRs", "A pod of another node is masqueraded where only the node's range counts.", setupNodePodCIDRs, services,
			every([]place{remote1}, toVIP, masqueradedTo(pod1, remote0)),
			every([]place{pod0}, toVIP, keptBy(pod1, remote0))),
		packets("PKT-06/interface_prefix", "A pod of another node is masqueraded where only the node's interfaces count.", setupInterfaces, services,
			every([]place{remote1}, toVIP, masqueradedTo(pod1, remote0))),
	}
}

// clusterIPPolicyScenarios are about internalTrafficPolicy and empty Services.
func clusterIPPolicyScenarios() []scenario {
	toVIP := []target{clusterIP}
	local := []ServiceOption{InternalPolicyLocal()}
	return []scenario{
		packets("PKT-07", "Under internalTrafficPolicy Local, a ClusterIP leads to local endpoints, and masquerading is the same.",
			setupDefault, []service{{options: local, endpoints: ready(pod1, remote0)}},
			every([]place{pod0, pod1, remote1}, toVIP, keptBy(pod1)),
			every([]place{node, client}, toVIP, masqueradedTo(pod1))),
		packets("PKT-07/no_detector", "Masquerading is the same under internalTrafficPolicy Local, also without detection of local traffic.",
			setupNoDetector, []service{{options: local, endpoints: ready(pod1, remote0)}},
			every([]place{pod0, node, client}, toVIP, keptBy(pod1))),
		packets("PKT-08", "Under internalTrafficPolicy Local, packets are dropped if all endpoints are on other nodes.",
			setupDefault, []service{
				{options: local, endpoints: ready(remote0)},
				{options: local, endpoints: ready(remote0), external: true},
			},
			every([]place{pod0, node, client, remote1}, toVIP, isDropped()),
			toSecond(every([]place{pod0, node, client}, toVIP, isDropped()))),
		packets("PKT-09", "A ClusterIP without endpoints rejects all clients.", setupDefault, []service{{}, {options: local}},
			every([]place{pod0, node, client, remote0}, toVIP, isRejected()),
			toSecond(every([]place{pod0, node, client}, toVIP, isRejected()))),
		checks("PKT-09/first_packet", "A TCP client of a Service without endpoints is refused at once: it sends its first packet once.",
			checkRefusedAtOnce, service{external: true}).over("tcp"),
	}
}

// checkRefusedAtOnce counts the SYNs that clients repeat.
func checkRefusedAtOnce(ctx context.Context, s *stage, c combo) (results []result) {
	for _, p := range slices.Concat(every([]place{pod0, node}, []target{clusterIP}, isRejected()), every([]place{client}, external(), isRejected())) {
		a := s.attempt(p, c)
		before, err := a.from.host.synsAgain()
		err = errors.Join(err, a.run(ctx))
		after, afterErr := a.from.host.synsAgain()
		if after != before {
			err = errors.Join(err, a.faultf("refused after its %d. repetition", after-before))
		}
		results = append(results, result{p.name(), errors.Join(err, afterErr)})
	}
	return results
}

// synsAgain returns how many SYNs a host has sent more than once.
func (h *Host) synsAgain() (n int, err error) {
	const field = "TCPSynRetrans"
	var text []byte
	if err := h.Do(func() error { text, err = os.ReadFile("/proc/thread-self/net/netstat"); return err }); err != nil {
		return 0, err
	}
	names, values, _ := strings.Cut(string(text), "\n") // the first two lines: names and values of TcpExt
	values, _, _ = strings.Cut(values, "\n")
	i := slices.Index(strings.Fields(names), field)
	if i < 0 {
		return 0, fmt.Errorf("netstat has no %s", field)
	}
	return strconv.Atoi(strings.Fields(values)[i])
}

// serviceAddressScenarios are about packets to addresses of the Service ranges that are no
// frontend.
func serviceAddressScenarios(f Features) []scenario {
	refusal, silence := isRejected(), isDropped()
	if f.ServiceIPsPass {
		refusal, silence = isUnanswered(), isUnanswered()
	}
	everybody := []place{pod0, node, client}
	services := []service{{endpoints: ready(pod1)}}
	udpOnly := func(s *v1.Service) { s.Spec.Ports = s.Spec.Ports[1:] }
	return []scenario{
		packets("PKT-10", "A ClusterIP rejects ports that its Service does not have.", setupDefault, services,
			every(everybody, []target{undefinedPort}, refusal),
			every([]place{pod0}, []target{clusterIP}, keptBy(pod1))),
		otherPortsOfLoadBalancers(f),
		packets("PKT-10/protocol", "A ClusterIP rejects a protocol that its Service does not have at that port.", setupDefault,
			[]service{{endpoints: ready(pod1), options: []ServiceOption{udpOnly}}},
			every(everybody, []target{clusterIP}, refusal)).over("tcp"),
		packets("PKT-11", "Packets to an unallocated address of the Service ranges are dropped.", setupDefault, services,
			every(everybody, []target{unallocatedIP}, silence),
			every([]place{pod0}, []target{clusterIP}, keptBy(pod1))).withServiceCIDRs(),
		packets("PKT-12", "A ClusterIP rejects protocols other than TCP, UDP and SCTP, such as pings.", setupDefault, services,
			every(everybody, []target{clusterIP}, refusal)).over("icmp"),
		packets("PKT-14", "An address of the node within the Service ranges reaches the node.", setupDefault, services,
			every([]place{pod0, remote0, node, client}, []target{nodesServiceIP}, keptBy(node)),
			every([]place{pod0}, []target{clusterIP}, keptBy(pod1))).withServiceCIDRs(),
		packets("PKT-14/cluster_IP", "A ClusterIP that is an address of the node reaches the Service at its ports, and the node at others.",
			setupDefault, []service{{endpoints: ready(pod1), clusterIP: localServiceIP}},
			every([]place{pod0, remote0, node, client}, []target{nodesServiceIP}, keptBy(node)),
			every([]place{pod0, remote0}, []target{clusterIP}, keptBy(pod1)),
			every([]place{node, client}, []target{clusterIP}, masqueradedTo(pod1))).withServiceCIDRs(),
	}
}

// otherPortsOfLoadBalancers is about ports that no Service has.
func otherPortsOfLoadBalancers(f Features) scenario {
	outcome := isUnanswered()
	if f.VIPsAreLocal || f.ClosedLoadBalancerIPs {
		outcome = isRejected()
	}
	return packets("PKT-10/load_balancer", "So does a load balancer IP, where engine and configuration say so; at others, packets are routed as usual.",
		setupDefault, []service{{external: true, endpoints: ready(pod1)}},
		every([]place{pod0, node, client}, []target{otherPortOfVIP}, outcome),
		every([]place{client}, []target{nodePortLocalVIP, loadBalancer}, masqueradedTo(pod1)))
}

// unproxiedScenarios are about Services that are not proxied. Their external IP is the
// address of a host, which answers if the packet reaches it.
func unproxiedScenarios() []scenario {
	cloud := ExternalIPs(inBoth(cloudVIP)...)
	passes := func(name string, opts ...ServiceOption) scenario {
		return packets("PKT-13/"+name, "A Service without a ClusterIP is not programmed, not even at its external IPs.",
			setupDefault, []service{{endpoints: ready(pod1), options: append(opts, cloud)}},
			every([]place{pod0, client, node}, []target{cloudLoadBalancer}, keptBy(router)))
	}
	return []scenario{
		passes("headless", Headless()),
		passes("ExternalName", ExternalName("example.com")),
		passes("without_clusterIP", ClusterIPs()),
	}
}

// annotationKeep keeps the ClusterIP of a Service under setupNoClusterIPs.
const annotationKeep = "proxiertest/keep-cluster-ip"

// vipOnlyScenarios are about service ports without ClusterIP: one with external addresses
// only, and one with a node port only.
func vipOnlyScenarios() []scenario {
	everybody := []place{pod0, node, client}
	refused := func(s *v1.Service) { // it has no frontend left
		s.Spec.ExternalIPs, s.Status.LoadBalancer.Ingress = inBoth(podAddr(pod2)), nil
	}
	noVIPs := func(s *v1.Service) { s.Spec.ExternalIPs, s.Status.LoadBalancer.Ingress = nil, nil }
	services := func(options ...ServiceOption) []service {
		return []service{
			{external: true, endpoints: ready(pod1, remote0), options: append(options, noNodePorts)},
			{external: true, endpoints: ready(pod1, remote0), options: append(options, noVIPs)},
			{external: true, endpoints: ready(pod1, remote0), options: append(options, noNodePorts, refused)},
		}
	}
	vips := []target{externalIP, loadBalancer}
	outside := slices.Concat(every(everybody, vips, masqueradedTo(pod1, remote0)), every([]place{client}, []target{nodePort}, isRejected()),
		toSecond(slices.Concat(every(everybody, []target{nodePort}, masqueradedTo(pod1, remote0)), every([]place{client}, vips, isUnanswered()))))
	inside := func(w want) []probe {
		return slices.Concat(every([]place{pod0, node}, []target{clusterIP}, w), toSecond(every([]place{pod0, node}, []target{clusterIP}, w)))
	}
	return []scenario{
		{
			name: "PKT-15", rule: "A service port whose ClusterIP a hook removed is served at its other VIPs, or its node port, only.",
			setup: setupNoClusterIPs,
			play: func(ctx context.Context, t *testing.T, s *stage) {
				t.Helper()
				keep := func(s *v1.Service) { s.Annotations = map[string]string{annotationKeep: "yes"} }
				for range 2 {
					s.publish(ctx, t, services()...)
					s.probe(ctx, t, scenario{probes: slices.Concat(outside, inside(isUnanswered()))})
					s.publish(ctx, t, services(keep)...)
					s.probe(ctx, t, scenario{probes: slices.Concat(outside, inside(answeredBy(pod1, remote0)))})
				}
			},
		},
		packets("PKT-15/local", "externalTrafficPolicy Local applies to it; internalTrafficPolicy does not.",
			setupNoClusterIPs, services(ExternalPolicyLocal(), InternalPolicyLocal()),
			every([]place{client}, vips, keptBy(pod1)),
			toSecond(every([]place{client}, []target{nodePort}, keptBy(pod1)))),
		packets("PKT-15/no_endpoints", "Without endpoints, it rejects.",
			setupNoClusterIPs, []service{{external: true, options: []ServiceOption{noNodePorts}}, {external: true, options: []ServiceOption{noVIPs}}},
			every([]place{client, pod0}, vips, isRejected()),
			toSecond(every([]place{client, pod0}, []target{nodePort}, isRejected()))),
	}
}

// toSecond makes the second service the destination of probes.
func toSecond(probes []probe) []probe {
	for i := range probes {
		probes[i].service = 1
	}
	return probes
}
