package proxiertest

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// externalScenarios are about node ports, external IPs and load balancer IPs under
// externalTrafficPolicy Cluster.
func externalScenarios() []scenario {
	everybody := []place{pod0, node, client, remote1}
	return []scenario{
		packets("PKT-20", "Under externalTrafficPolicy Cluster, all clients of external frontends are masqueraded.",
			setupDefault, []service{{external: true, endpoints: ready(pod0, pod1, remote0)}},
			every(everybody, external(), masqueradedTo(pod0, pod1, remote0))),
		packets("PKT-20/no_detector", "All clients are masqueraded, also without detection of local traffic.",
			setupNoDetector, []service{{external: true, endpoints: ready(pod1, remote0)}},
			every(everybody, external(), masqueradedTo(pod1, remote0))),
		packets("PKT-28", "internalTrafficPolicy Local applies to the ClusterIP only.",
			setupDefault, []service{{external: true, options: []ServiceOption{InternalPolicyLocal()}, endpoints: ready(pod1, remote0)}},
			every(everybody, external(), masqueradedTo(pod1, remote0)),
			every([]place{pod0}, []target{clusterIP}, keptBy(pod1))),
		packets("PKT-34", "A load balancer IP and port wins over a node port at the same address and port.",
			setupDefault, []service{
				{external: true, endpoints: ready(pod1), vip: localVIP, options: []ServiceOption{atNodePort}},
				{external: true, endpoints: ready(remote0), nodePort: idleHostPort},
			},
			toSecond(every([]place{pod0, client, node}, []target{nodePortLocalVIP}, masqueradedTo(pod1))),
			toSecond(every([]place{pod0, client, node}, []target{nodePort, nodePortSecondary}, masqueradedTo(remote0)))),
		packets("PKT-36", "A load balancer IP with ipMode Proxy is not programmed; all other frontends work.",
			setupDefault, []service{{external: true, endpoints: ready(pod1), options: []ServiceOption{cloudIngress}}},
			every([]place{pod0, client, node}, []target{cloudLoadBalancer}, keptBy(router)),
			every([]place{pod0, client, node}, []target{nodePort, externalIP}, masqueradedTo(pod1)),
			every([]place{pod0}, []target{clusterIP}, keptBy(pod1))),
	}
}

// refusedScenarios are about addresses that are not programmed.
func refusedScenarios() []scenario {
	return []scenario{
		{
			name: "PKT-29/loopback_endpoint", rule: "An endpoint at a loopback address is not used.",
			services: []service{{external: true, endpoints: append(ready(pod1), endpoint{addrs: loopback})}},
			play: func(ctx context.Context, t *testing.T, s *stage) {
				t.Helper()
				netnstest.Serve(t, s.world.Node.ns, "node-itself", podPort)
				s.probe(ctx, t, scenario{probes: slices.Concat(
					every([]place{client, pod0}, external(), masqueradedTo(pod1)), every([]place{pod0, node}, []target{clusterIP}, answeredBy(pod1)))})
				s.publish(ctx, t, service{external: true, endpoints: []endpoint{{addrs: loopback}}})
				s.probe(ctx, t, scenario{probes: every([]place{client, pod0}, external(), isRejected())})
			},
		},
		packets("PKT-29/external_IP_of_a_pod", "An external IP in the pod CIDRs is not programmed; the other addresses work.",
			setupDefault, []service{{external: true, endpoints: ready(pod1), options: []ServiceOption{ExternalIPs(inBoth(podAddr(pod2))...)}}},
			every([]place{pod0}, []target{podAddress}, isRejected()),
			every([]place{client, pod0}, external(), masqueradedTo(pod1))),
		packets("PKT-29/load_balancer_IP_of_a_pod", "A load balancer IP in the pod CIDRs is not programmed; the other addresses work.",
			setupDefault, []service{{external: true, endpoints: ready(pod1), options: []ServiceOption{LoadBalancer(inBoth(podAddr(pod2))...)}}},
			every([]place{pod0}, []target{podAddress}, isRejected()),
			every([]place{client, pod0}, external(), masqueradedTo(pod1))),
		{
			name: "PKT-29/external_IP_of_the_node", rule: "With DenyNodeExternalIPs, an external IP that is an address of the node is not programmed.",
			setup: setupDenyNode,
			services: []service{{external: true, nodePort: idleHostPort, endpoints: ready(pod1), options: []ServiceOption{
				ExternalIPs("192.0.2.10", "2001:db8:2::10", "192.0.2.20", "2001:db8:2::20"), atNodePort,
			}}},
			play: func(ctx context.Context, t *testing.T, s *stage) {
				t.Helper()
				everybody, node := []place{pod0, client, node}, s.world.Config().Node
				denied, others := []target{nodePort}, []target{nodePortSecondary}
				for range 2 {
					s.probe(ctx, t, scenario{probes: slices.Concat(every(everybody, denied, isRejected()), every(everybody, others, masqueradedTo(pod1)))})
					node.Addresses = s.world.Node.Addrs[2:4]
					s.provider.OnNodeChange(node)
					s.sync(ctx, t)
					denied, others = others, denied
				}
			},
		},
	}
}

func loopback(family v1.IPFamily) netip.Addr { return familyAddr(family, "127.0.0.1", "::1") }

// disputeScenarios are about addresses of several Services. The younger Service is
// published first, and is first by name.
func disputeScenarios() []scenario {
	shared := ExternalIPs(inBoth(sharedAddr)...)
	nodeAddrs := ExternalIPs("192.0.2.10", "2001:db8:2::10")
	created := func(at int64, name string, endpoints []endpoint, options []ServiceOption) service {
		options = append(options, Created(time.Unix(at, 0)))
		return service{name: name, external: true, nodePort: idleHostPort, endpoints: endpoints, options: options}
	}
	younger := func(options ...ServiceOption) service { return created(2e9, "aaa", ready(remote0), options) }
	older := func(options ...ServiceOption) service { return created(1e9, "zzz", ready(pod1), options) }
	everybody := []place{pod0, client, node}
	return []scenario{
		plays("PKT-37", "Of two Services with one external IP, the older one has it until it is deleted.",
			playDispute(sharedExternalIP), younger(shared, noNodePorts), older(shared, noNodePorts)),
		plays("PKT-38", "A younger Service's external IP at an address of the node does not win over a node port of an older Service.",
			playDispute(nodePort), younger(nodeAddrs, atNodePort), older()),
		packets("PKT-38/older_external_IP", "An older Service's external IP at an address of the node wins over a node port.",
			setupDefault, []service{younger(), older(nodeAddrs, atNodePort)},
			every(everybody, []target{nodePort}, masqueradedTo(pod1)),
			every(everybody, []target{nodePortSecondary}, masqueradedTo(remote0))),
		packets("PKT-38/older_external_IP_without_endpoints", "Without endpoints, it rejects, and the other Service gets no packets.",
			setupDefault, []service{younger(), withoutEndpoints(older(nodeAddrs, atNodePort))},
			every(everybody, []target{nodePort}, isRejected()),
			every(everybody, []target{nodePortSecondary}, masqueradedTo(remote0))),
	}
}

// playDispute deletes the older Service.
func playDispute(disputed ...target) func(context.Context, *testing.T, *stage) {
	return func(ctx context.Context, t *testing.T, s *stage) {
		t.Helper()
		everybody := []place{pod0, client, node}
		s.probe(ctx, t, scenario{probes: every(everybody, disputed, masqueradedTo(pod1))})
		s.remove(s.services[1])
		s.services = s.services[:1]
		s.sync(ctx, t)
		s.probe(ctx, t, scenario{probes: every(everybody, disputed, masqueradedTo(remote0))})
	}
}

func withoutEndpoints(s service) service {
	s.endpoints = nil
	return s
}

// noNodePorts removes the node ports of a Service.
func noNodePorts(s *v1.Service) {
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].NodePort = 0
	}
}

// atNodePort gives a Service the port that is another one's node port, and no node ports of
// its own.
func atNodePort(s *v1.Service) {
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].Port, s.Spec.Ports[i].NodePort = idleHostPort, 0
	}
}

// cloudIngress replaces the ingress by two that are not programmed: one with ipMode Proxy
// (KEP-1860), and a host name.
func cloudIngress(s *v1.Service) {
	s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{Hostname: "lb.example.com"}}
	for _, family := range families() {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress,
			v1.LoadBalancerIngress{IP: cloudVIP(family).String(), IPMode: ptr.To(v1.LoadBalancerIPModeProxy)})
	}
}

// externalPolicyScenarios are about externalTrafficPolicy Local.
func externalPolicyScenarios(f Features) []scenario {
	local := []ServiceOption{ExternalPolicyLocal()}
	here := []service{{external: true, options: local, endpoints: ready(pod1, remote0)}}
	elsewhere := []service{{external: true, options: local, endpoints: ready(remote0, remote1)}}
	insiders := []place{pod1, remote0}
	if f.LocalPolicyBindsAll {
		insiders = []place{pod1}
	}
	return []scenario{
		packets("PKT-21", "Under externalTrafficPolicy Local, a client outside the cluster keeps its source and reaches local endpoints.",
			setupDefault, here, every([]place{client, otherClient}, external(), keptBy(pod1))),
		packets("PKT-21/node_pod_CIDRs", "Under externalTrafficPolicy Local with NodePodCIDRs, a pod of another node is outside the cluster.",
			setupNodePodCIDRs, here, every([]place{client, remote1}, external(), keptBy(pod1))),
		packets("PKT-22", "Under externalTrafficPolicy Local, packets from outside are dropped if all endpoints are on other nodes.",
			setupDefault, elsewhere, every([]place{client}, external(), isDropped())),
		packets("PKT-23", "Under externalTrafficPolicy Local, pods reach all endpoints and keep their source.", setupDefault, here,
			every([]place{pod0, pod1}, external(), keptBy(insiders...))),
		packets("PKT-23/none_local", "Under externalTrafficPolicy Local, pods reach all endpoints, also if these are on other nodes.",
			setupDefault, elsewhere, every([]place{pod0}, external(), keptBy(remote0, remote1))),
		packets("PKT-23/interface_prefix", "Under externalTrafficPolicy Local, pods that are detected by interface reach all endpoints.",
			setupInterfaces, here, every([]place{pod0}, external(), keptBy(insiders...))),
		packets("PKT-24", "Without detection of local traffic, externalTrafficPolicy Local applies to pods.",
			setupNoDetector, slices.Concat(here, elsewhere),
			every([]place{pod0}, external(), keptBy(pod1)),
			toSecond(every([]place{pod0}, external(), isDropped()))),
		packets("PKT-25", "Under externalTrafficPolicy Local, the node reaches all endpoints and is masqueraded.",
			setupDefault, slices.Concat(here, elsewhere),
			every([]place{node}, external(), masqueradedTo(insiders...)),
			toSecond(every([]place{node}, external(), masqueradedTo(remote0, remote1)))),
	}
}

// healthCheckScenarios are about packets to health check node ports, where a process of the
// test listens.
func healthCheckScenarios(f Features) []scenario {
	atVIP, atClusterIP := isUnanswered(), isRejected()
	if f.VIPsAreLocal {
		atVIP, atClusterIP = keptBy(node), keptBy(node)
	}
	if f.ClosedLoadBalancerIPs {
		atVIP = isRejected()
	}
	if f.ServiceIPsPass {
		atClusterIP = isUnanswered()
	}
	outside := []place{client, otherClient, pod0, remote1}
	services := []service{
		{external: true, options: []ServiceOption{healthChecked}, endpoints: ready(pod1)},
		{external: true, options: []ServiceOption{healthChecked}, vip: localVIP},
	}
	return []scenario{packets("PKT-50", "A health check node port is reached at all of the node's addresses, also at VIPs, with endpoints and without.",
		setupDefault, services,
		every(outside, []target{healthOfNode, healthOfLocalVIP}, keptBy(node)),
		every(outside, []target{healthOfVIP}, atVIP),
		every(outside, []target{healthOfClusterIP}, atClusterIP),
		toSecond(every(outside, []target{healthOfClusterIP}, atClusterIP)),
		every([]place{node}, []target{healthOfNode, healthOfLocalVIP}, answeredBy(node))).over("tcp")}
}

// healthChecked adds a health check node port.
func healthChecked(s *v1.Service) {
	s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	s.Spec.HealthCheckNodePort = hostPort
}

// emptyScenarios are about external frontends without endpoints.
func emptyScenarios(f Features) []scenario {
	local := []ServiceOption{ExternalPolicyLocal()}
	fromNode := isRejected()
	if f.EmptyExternalLeavesNode {
		fromNode = isUnanswered()
	}
	return []scenario{
		packets("PKT-26", "External frontends without endpoints reject all clients.",
			setupDefault, []service{{external: true}, {external: true, options: local}},
			every([]place{pod0, client, remote0}, external(), isRejected()),
			toSecond(every([]place{pod0, client}, external(), isRejected()))),
		packets("PKT-27", "External frontends without endpoints reject the node.",
			setupDefault, []service{{external: true}, {external: true, options: local}},
			every([]place{node}, []target{externalIP, loadBalancer}, fromNode),
			toSecond(every([]place{node}, []target{externalIP, loadBalancer}, fromNode)),
			every([]place{node}, []target{nodePort}, isRejected())),
	}
}

// loopbackScenarios are about node ports at 127.0.0.1 and ::1.
func loopbackScenarios(f Features) []scenario {
	services := []service{
		{external: true, endpoints: ready(pod1)},
		{external: true, endpoints: ready(pod1), nodePort: hostPort},
	}
	refused := slices.Concat(
		every([]place{nodeAnywhere}, []target{nodePortLoopback}, isRejected()), // by the kernel: no socket
		toSecond(every([]place{nodeAnywhere}, []target{nodePortLoopback}, answeredBy(node))))
	here := packets("PKT-32/127.0.0.1", "A node port is not accepted at 127.0.0.1: a process of the node answers, or the kernel rejects.",
		setupDefault, services, refused).in(v1.IPv4Protocol)
	if f.LoopbackNodePorts {
		here.rule = "A node port is accepted at 127.0.0.1."
		here.probes = every([]place{nodeAnywhere}, []target{nodePortLoopback}, answeredBy(pod1))
	}
	return append(localhostScenarios(f), here,
		packets("PKT-32/::1", "A node port is not accepted at ::1: a process of the node answers, or the kernel rejects.",
			setupDefault, services, refused).in(v1.IPv6Protocol))
}

// localhostScenarios are about node ports at 127.0.0.1 and ::1 if they are asked for.
func localhostScenarios(f Features) []scenario {
	local := []ServiceOption{ExternalPolicyLocal(), InternalPolicyLocal()}
	both := packets("PKT-32/asked", "A node port is not accepted at localhost by an engine that cannot, also if it is asked for.",
		setupLocalhost, []service{{external: true, endpoints: ready(pod1, remote0)}, {external: true, options: local, endpoints: ready(remote0)}},
		every([]place{client, remote0}, []target{nodePort}, masqueradedTo(pod1, remote0))) // as elsewhere
	atLocalhost := func(want want) []probe { return every([]place{nodeAnywhere}, []target{nodePortLoopback}, want) }
	accepted := slices.Concat(both.probes, atLocalhost(masqueradedTo(pod1, remote0)), toSecond(atLocalhost(masqueradedTo(remote0))))
	all := []scenario{packets("PKT-32/empty", "A node port without endpoints rejects at localhost.",
		setupLocalhost, []service{{external: true}}, atLocalhost(isRejected()))}
	if f.LocalhostSockets || f.LoopbackNodePorts {
		served := both
		served.name, served.probes = "PKT-32/served", accepted
		served.rule = "A node port is accepted at localhost if it is asked for, whatever the external traffic policy."
		if !f.LocalhostSockets {
			served = served.in(v1.IPv4Protocol)
		}
		all = append(all, served)
	}
	if f.LocalhostSockets {
		return all
	}
	if f.LoopbackNodePorts {
		both = both.in(v1.IPv6Protocol)
	}
	both.probes = append(both.probes, atLocalhost(isRejected())...)
	return append(all, both)
}

// nodePortScenarios are about the node's addresses that accept node ports.
func nodePortScenarios(f Features) []scenario {
	all := []target{nodePort, nodePortSecondary, nodePortClientLink, nodePortPodLink, nodePortLocalVIP}
	others := all[1:]
	limited := func(name string, setup setup) scenario {
		return packets(name, "Addresses that do not accept node ports lead to processes of the node.",
			setup, []service{{external: true, endpoints: ready(pod1), nodePort: hostPort}, {external: true, endpoints: ready(pod1)}},
			every([]place{pod0, client, node, remote0}, []target{nodePort}, masqueradedTo(pod1)),
			every([]place{pod0, client, remote0}, others, keptBy(node)),
			toSecond(every([]place{pod0, client, node}, others, isRejected()))) // by the kernel: no socket
	}
	empty, emptyLocal := keptBy(node), keptBy(node)
	if f.EmptyNodePortsEverywhere {
		empty, emptyLocal = isRejected(), isDropped()
	}
	return []scenario{
		packets("PKT-30", "A node port is accepted at every address of the node.",
			setupDefault, []service{{external: true, endpoints: ready(pod1, remote0)}},
			every([]place{pod0, client, remote1, node}, all, masqueradedTo(pod1, remote0))),
		limited("PKT-31", setupAddresses),
		limited("PKT-31/primary", setupPrimary),
		packets("PKT-35", "A node port without endpoints rejects; without local ones under externalTrafficPolicy Local, it drops.",
			setupDefault, []service{{external: true}, {external: true, options: []ServiceOption{ExternalPolicyLocal()}, endpoints: ready(remote0)}},
			every([]place{pod0, client, node}, all, isRejected()),
			toSecond(every([]place{client}, all, isDropped()))),
		packets("PKT-35/addresses", "A node port without endpoints does not reject at addresses that do not accept node ports.",
			setupAddresses, []service{{external: true, nodePort: hostPort}},
			every([]place{client}, []target{nodePort}, isRejected()),
			every([]place{client}, others, empty)),
		packets("PKT-35/addresses_none_local", "A node port without local endpoints does not drop at addresses that do not accept node ports.",
			setupAddresses, []service{{
				external: true, nodePort: hostPort, options: []ServiceOption{ExternalPolicyLocal()}, endpoints: ready(remote0),
			}},
			every([]place{client}, []target{nodePort}, isDropped()),
			every([]place{client}, others, emptyLocal)),
	}
}
