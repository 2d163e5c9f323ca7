package proxiertest

import (
	"context"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// scenario is one rule about packets: Services that exist, and what whoever dials
// them experiences.
type scenario struct {
	// name begins with the number of the rule in the packet behaviour table,
	// "PKT-22", and tells variants apart behind a slash.
	name string
	// rule is a sentence, printed when packets break it.
	rule     string
	setup    setup
	services []service
	// serviceCIDRs are told to the Provider while the scenario runs.
	serviceCIDRs []netip.Prefix
	// needs is the field of proxier.Deps that has to be there, if any.
	needs string
	// networks is what to dial with; nil means tcp and udp.
	networks []string
	// families is where the probes apply; nil means both.
	families []v1.IPFamily
	probes   []probe
	// play, if set, runs instead of the probes.
	play func(ctx context.Context, t *testing.T, s *stage)
}

// service describes a Service with a TCP and a UDP port of the same number, in
// both families, and with addresses of its own. Only what matters is said.
type service struct {
	// namespace and name default to something unique.
	namespace, name string
	// tcpPort and udpPort are the names of the ports; "tcp" and "udp" if empty.
	tcpPort, udpPort string
	// external gives it a node port, an external IP and a load balancer too.
	external bool
	// nodePort is a fixed node port, for an external service; 0 means its own.
	nodePort int32
	// vip is a fixed load balancer address, for an external service; nil means its
	// own.
	vip func(family v1.IPFamily) netip.Addr
	// podPort is where the endpoints serve; 0 means podPort.
	podPort int32
	// clusterIP is a fixed ClusterIP; nil means its own.
	clusterIP func(family v1.IPFamily) netip.Addr
	// options are applied last.
	options   []ServiceOption
	endpoints []endpoint
}

// endpoint is one pod that serves a service. The zero condition is ready.
type endpoint struct {
	at        place
	condition EndpointOption
	// node is what the slice says of where it runs; "" is the truth.
	node string
	// addrs, if set, is where it says to be, instead of at that place.
	addrs func(v1.IPFamily) netip.Addr
	// crowd, if not 0, is an address of the crowded pod instead.
	crowd int
}

// nameless is the node of an endpoint whose slice names none.
const nameless = "-"

// place is somewhere in the Topology to dial from, or to answer at.
type place string

// The places. The node dials from its second address, which masquerading never
// picks; nodeMain dials from the first one. nodeAsVIP dials from the load
// balancer's address, which the node has too, and nodeAnywhere lets routing pick.
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

// The targets. The node ports differ in the address: the node's main one, its
// second one, those of its links to the client and to the first pod, and an
// address that is also some load balancer's. At the service IP of the node, a process of
// the node answers.
const (
	clusterIP          target = "clusterIP"
	undefinedPort      target = "clusterIP_undefined_port"
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

// probe is one packet's way and fate.
type probe struct {
	from    place
	to      target
	service int // index in scenario.services, 0 or 1
	want    want
}

// want is a fate: an outcome and, if it is an answer, who may give it and whose
// address he sees. Everyone who may answer has to do so sooner or later.
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
	unanswered outcome = "not answered, in whatever way"
)

type source string

const (
	anySource source = "any"
	// kept is the client's own address, but masqueraded where the client is the
	// endpoint that was chosen, as without that it would drop its own packets.
	kept source = "kept"
	// masqueraded is an address of the node, and not the client's.
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

// every combines each place with each target, for the first service.
func every(from []place, to []target, expected want) []probe {
	var probes []probe
	for _, place := range from {
		for _, target := range to {
			probes = append(probes, probe{from: place, to: target, want: expected})
		}
	}
	return probes
}

// external is what traffic from outside can be addressed to.
func external() []target { return []target{nodePort, externalIP, loadBalancer} }

func ready(at ...place) []endpoint { return inCondition(nil, at) }

func terminating(at ...place) []endpoint { return inCondition(Terminating(), at) }

func notServing(at ...place) []endpoint { return inCondition(NotServing(), at) }

// unready are endpoints of a Service with publishNotReadyAddresses: ready, but not
// serving.
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

// crowd is n endpoints of the crowded pod.
func crowd(n int) []endpoint {
	endpoints := make([]endpoint, n)
	for i := range endpoints {
		endpoints[i] = endpoint{at: pod2, crowd: i + 1}
	}
	return endpoints
}
