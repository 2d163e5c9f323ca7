package proxiertest

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// scenario is one rule about packets: Services, and what happens to connections to them.
type scenario struct {
	// name is the rule's code in docs/RULES.md, "PKT-22", with variants after a slash.
	name string
	// rule is a sentence, which is printed when packets break it.
	rule     string
	setup    setup
	services []service
	// serviceCIDRs are the Provider's while the scenario runs.
	serviceCIDRs []netip.Prefix
	// needs is the field of proxier.Deps that must not be nil, if any.
	needs string
	// networks are the networks to dial; nil means tcp and udp.
	networks []string
	// families are the IP families of the probes; nil means both.
	families []v1.IPFamily
	probes   []probe
	// check, if not nil, runs instead of the probes, for all families and networks at once.
	check checker
	// play, if not nil, runs instead of all these.
	play func(ctx context.Context, t *testing.T, s *stage)
}

// checker finds out what happens to packets of a family and network.
type checker func(ctx context.Context, s *stage, c combo) []result

// packets returns a scenario that sends the packets of all probes.
func packets(name, rule string, setup setup, services []service, probes ...[]probe) scenario {
	return scenario{name: name, rule: rule, setup: setup, services: services, probes: slices.Concat(probes...)}
}

// checks returns a scenario that checks each family and network.
func checks(name, rule string, check checker, services ...service) scenario {
	return scenario{name: name, rule: rule, check: check, services: services}
}

// plays returns a scenario that runs a function.
func plays(name, rule string, play func(context.Context, *testing.T, *stage), services ...service) scenario {
	return scenario{name: name, rule: rule, play: play, services: services}
}

// over limits a scenario to networks.
func (sc scenario) over(networks ...string) scenario {
	sc.networks = networks
	return sc
}

// in limits a scenario to IP families.
func (sc scenario) in(families ...v1.IPFamily) scenario {
	sc.families = families
	return sc
}

// needingConntrack says that Conntrack of proxier.Deps must not be nil.
func (sc scenario) needingConntrack() scenario {
	sc.needs = "Conntrack"
	return sc
}

// withServiceCIDRs lets the Provider know the ranges of ClusterIPs.
func (sc scenario) withServiceCIDRs() scenario {
	sc.serviceCIDRs = serviceCIDRs()
	return sc
}

// service describes a Service with a TCP and a UDP port of the same number, in
// both families, and with addresses of its own. Zero fields have defaults.
type service struct {
	// namespace is "conformance" by default; the default name is unique.
	namespace, name string
	// tcpPort and udpPort are the names of the ports; "tcp" and "udp" if empty.
	tcpPort, udpPort string
	// external adds a node port, external IPs and load balancer IPs.
	external bool
	// nodePort is the node port of an external service; 0 means a unique one.
	nodePort int32
	// vip is the load balancer IP of an external service; nil means a unique one.
	vip func(family v1.IPFamily) netip.Addr
	// podPort is where the endpoints serve; 0 means podPort.
	podPort int32
	// clusterIP is the ClusterIP; nil means a unique one.
	clusterIP func(family v1.IPFamily) netip.Addr
	// options are applied last.
	options   []ServiceOption
	endpoints []endpoint
}

// endpoint is one endpoint of a service. The zero condition is ready.
type endpoint struct {
	at        place
	condition EndpointOption
	// node is its node name in the slice; "" means the real one.
	node string
	// addrs, if not nil, are its addresses in the slice, instead of the place's.
	addrs func(v1.IPFamily) netip.Addr
	// extra, if not 0, is the number of an address of the last local pod.
	extra int
}

// nameless is the node of an endpoint without a node name.
const nameless = "-"

// place is a host and address in the Topology that dials, or serves.
type place string

// The node dials from its second address, which masquerading does not use; nodeMain dials
// from the first one. nodeAsVIP dials from a load balancer IP that the node has, and
// nodeAnywhere from the address that routing selects.
const (
	client       place = "client"
	otherClient  place = "other-client"
	node         place = "node"
	nodeMain     place = "node-main"
	nodeAsVIP    place = "node-as-vip"
	nodeAnywhere place = "node-anywhere"
	router       place = "router"
	pod0         place = "pod-0"
	pod1         place = "pod-1"
	pod2         place = "pod-2"
	remote0      place = "remote-0"
	remote1      place = "remote-1"
)

// target is an address and port of a service to dial.
type target string

// The node ports are at different addresses: the node's main one, its second one, those of
// its links to the client and to the first pod, and one that is also a load balancer IP. At
// the service IP of the node, a process of the node answers.
const (
	clusterIP          target = "clusterIP"
	undefinedPort      target = "clusterIP_undefined_port"
	otherPortOfVIP     target = "loadBalancer_undefined_port"
	unallocatedIP      target = "unallocated_service_IP"
	nodesServiceIP     target = "service_IP_of_the_node"
	externalIP         target = "externalIP"
	sharedExternalIP   target = "externalIP_of_several"
	loadBalancer       target = "loadBalancer"
	cloudLoadBalancer  target = "cloud_loadBalancer"
	nodePort           target = "nodePort"
	nodePortSecondary  target = "nodePort_secondary"
	nodePortClientLink target = "nodePort_client_link"
	nodePortPodLink    target = "nodePort_pod_link"
	nodePortLocalVIP   target = "nodePort_local_VIP"
	nodePortLoopback   target = "nodePort_loopback"
	healthOfNode       target = "health_check_of_node"
	healthOfLocalVIP   target = "health_check_of_local_VIP"
	healthOfVIP        target = "health_check_of_loadBalancer"
	healthOfClusterIP  target = "health_check_of_clusterIP"
	nodePortLoopback2  target = "nodePort_loopback_127.0.0.5"
	podAddress         target = "address_of_a_pod"
)

// probe is a packet's source and destination, and what should happen to it.
type probe struct {
	from    place
	to      target
	service int // index in scenario.services, 0 or 1
	want    want
}

// want is an outcome and, if it is an answer, the servers and the source address that they
// see. Each of the servers has to answer at some time.
type want struct {
	outcome outcome
	servers []place
	source  source
}

type outcome string

const (
	answered   outcome = "answered"
	rejected   outcome = "rejected"
	dropped    outcome = "dropped"
	unanswered outcome = "not answered"
)

type source string

const (
	anySource source = "any"
	// kept is the client's address. A hairpin connection is masqueraded, because the
	// client would drop packets from its own address.
	kept source = "kept"
	// masqueraded is an address of the node that is not the client's.
	masqueraded source = "masqueraded"
)

func keptBy(servers ...place) want {
	return want{outcome: answered, servers: servers, source: kept}
}

func masqueradedTo(servers ...place) want {
	return want{outcome: answered, servers: servers, source: masqueraded}
}

func answeredBy(servers ...place) want {
	return want{outcome: answered, servers: servers, source: anySource}
}

func isRejected() want { return want{outcome: rejected} }

func isDropped() want { return want{outcome: dropped} }

func isUnanswered() want { return want{outcome: unanswered} }

// every returns a probe from each place to each target of the first service.
func every(from []place, to []target, expected want) []probe {
	var probes []probe
	for _, place := range from {
		for _, target := range to {
			probes = append(probes, probe{from: place, to: target, want: expected})
		}
	}
	return probes
}

// external are the targets for traffic from outside.
func external() []target { return []target{nodePort, externalIP, loadBalancer} }

func ready(at ...place) []endpoint { return inCondition(nil, at) }

func terminating(at ...place) []endpoint { return inCondition(Terminating(), at) }

func notServing(at ...place) []endpoint { return inCondition(NotServing(), at) }

// unready are endpoints as publishNotReadyAddresses makes them: ready, but not serving.
func unready(at ...place) []endpoint {
	return inCondition(func(e *discovery.Endpoint) { setConditions(e, true, false, false) }, at)
}

func inCondition(condition EndpointOption, at []place) []endpoint {
	endpoints := make([]endpoint, len(at))
	for i, place := range at {
		endpoints[i] = endpoint{at: place, condition: condition}
	}
	return endpoints
}

// extra is n endpoints at addresses of the last local pod.
func manyPods(n int) []endpoint {
	endpoints := make([]endpoint, n)
	for i := range endpoints {
		endpoints[i] = endpoint{at: pod2, extra: i + 1}
	}
	return endpoints
}
