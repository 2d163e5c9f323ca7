package proxiertest

import (
	"github.com/serviceplane/serviceplane/proxier"
)

// Factory returns the Provider under test. It must use the whole Config; Config.NetNS is
// the namespace that the packets go through.
type Factory func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error)

// Features declares how a data plane differs from the reference, the nftables mode of
// kube-proxy, which is the zero value. Conformance then expects the difference. Each one
// is documented for kube-proxy or known to its users.
type Features struct {
	// ServiceIPsPass routes packets to a ClusterIP at a port or with a protocol that
	// no Service has, and packets to unallocated addresses of the Service ranges
	// (PKT-10, PKT-11, PKT-12).
	ServiceIPsPass bool
	// LoopbackNodePorts accepts node ports on 127.0.0.0/8, but not on ::1 (PKT-32).
	LoopbackNodePorts bool
	// LocalhostSockets accepts node ports at 127.0.0.1 and ::1 by sockets if
	// Config.NodePorts.Localhost is set; Services that share the port with a program of the
	// node then fail (PKT-32).
	LocalhostSockets bool
	// RangesNeedEndpoints rejects packets to a load balancer IP without endpoints from
	// outside its source ranges, instead of dropping them (PKT-47).
	RangesNeedEndpoints bool
	// EmptyExternalLeavesNode routes the node's own packets to an external or load
	// balancer IP without endpoints (PKT-27).
	EmptyExternalLeavesNode bool
	// EmptyNodePortsEverywhere rejects or drops packets to a node port without
	// endpoints at all addresses, also at those that do not accept node ports (PKT-35).
	EmptyNodePortsEverywhere bool
	// LocalPolicyBindsAll sends pods and the node itself to local endpoints under
	// externalTrafficPolicy Local, as long as there are any (PKT-23, PKT-25).
	LocalPolicyBindsAll bool
	// SourceLost makes the source of every connection an address of the node, because
	// the proxy connects to endpoints itself (PKT-01, PKT-04, PKT-06, PKT-07, PKT-21,
	// PKT-23, PKT-40).
	SourceLost bool
	// NoSCTP refuses service ports with protocol SCTP.
	NoSCTP bool
	// AffinityPerFrontend has session affinity for each VIP and node port separately
	// (PKT-60).
	AffinityPerFrontend bool
	// AffinityOutlivesTimeout extends session affinity for as long as the data plane
	// stores one of the client's closed TCP connections (PKT-60).
	AffinityOutlivesTimeout bool
	// VIPsAreLocal adds the VIPs to an interface of the node, which therefore also
	// answers there at health check node ports (PKT-50).
	VIPsAreLocal bool
	// ClosedLoadBalancerIPs is that of desired.Traits (PKT-10).
	ClosedLoadBalancerIPs bool
	// FirstPriorityLost makes the first packet of the node's own connections leave with
	// priority 0, whatever SO_PRIORITY its socket has (PKT-87).
	FirstPriorityLost bool
	// HashFollowsHistory makes a consistent hash depend on the order in which the endpoints
	// came: with ten of them, on another node up to 2 % of the clients get another endpoint
	// (PKT-91).
	HashFollowsHistory bool
	// LeastConnections and NoHash are those of desired.Traits (PKT-91, PKT-93).
	LeastConnections, NoHash bool
	// ClientLimits is that of desired.Traits (PKT-100, PKT-101).
	ClientLimits bool
	// BySocket translates TCP sockets of the node and of its pods when they connect: a pod that
	// reaches itself may keep its source (PKT-02), and FirstPriorityLost is not for them (PKT-87).
	BySocket bool
	// UDPBySocket does the same for UDP sockets.
	UDPBySocket bool
	// PodsKeepSource lets sockets that BySocket translates keep the source of a local pod at all frontends (PKT-20).
	PodsKeepSource bool
	// Prepare, if not nil, gets the network namespaces of the node and of its pods, before the first
	// Provider is made.
	Prepare func(node string, pods []string)
	// Scenarios are those of the engine's author. Skip and Select are for them too.
	Scenarios []Scenario
	// Skip has the names of scenarios that do not apply, such as "PKT-60", with reasons.
	Skip map[string]string
	// Select, if not nil, chooses the scenarios to run by their names.
	Select func(name string) bool
}

// isBySocket is whether the sockets of a network are translated.
func (f *Features) isBySocket(network string) bool {
	return f.BySocket && (network == "tcp" || f.UDPBySocket && network == "udp")
}
