package proxiertest

import (
	"github.com/serviceplane/serviceplane/proxier"
)

// Factory builds the Provider under test. It must honour the Config, above all
// Config.NetNS, which is the namespace that the packets run through.
type Factory func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error)

// Features declares where a data plane is known to behave differently from the
// reference, which is the nftables mode of kube-proxy. The zero value is the
// reference. Each difference is one that kube-proxy's documentation or its users
// know; Conformance then expects it instead of ignoring the case.
type Features struct {
	// ServiceIPsPass lets packets to a ClusterIP at a port or with a protocol that
	// no Service has, and to unallocated addresses of the Service ranges, go where
	// routes lead (PKT-10, PKT-11, PKT-12).
	ServiceIPsPass bool
	// LoopbackNodePorts accepts node ports on 127.0.0.0/8, but not on ::1 (PKT-32).
	LoopbackNodePorts bool
	// RangesNeedEndpoints rejects instead of dropping what comes to a load balancer
	// from outside its source ranges when there are no endpoints (PKT-47).
	RangesNeedEndpoints bool
	// EmptyExternalLeavesNode lets the node's own packets to an external or load
	// balancer address without endpoints go where routes lead (PKT-27).
	EmptyExternalLeavesNode bool
	// EmptyNodePortsEverywhere rejects or drops packets to a node port without
	// endpoints also at addresses that do not accept node ports (PKT-35).
	EmptyNodePortsEverywhere bool
	// LocalPolicyBindsAll confines pods and the node itself to local endpoints
	// under externalTrafficPolicy Local, as long as there are any (PKT-23, PKT-25).
	LocalPolicyBindsAll bool
	// SourceLost shows endpoints an address of the node, whoever the client is: the
	// proxy connects to them itself (PKT-01, PKT-04, PKT-06, PKT-07, PKT-21, PKT-23,
	// PKT-40).
	SourceLost bool
	// NoSCTP refuses service ports of SCTP.
	NoSCTP bool
	// AffinityPerFrontend keeps a client's record for each VIP and node port
	// separately (PKT-60).
	AffinityPerFrontend bool
	// AffinityOutlivesTimeout lets a client stay with its endpoint for as long as the
	// data plane remembers one of its closed TCP connections (PKT-60).
	AffinityOutlivesTimeout bool
	// VIPsAreLocal has the VIPs on the node, which answers at health check node ports
	// there too, as at its other addresses (PKT-50).
	VIPsAreLocal bool
	// Skip names scenarios that do not apply at all, "PKT-60", with the reason.
	Skip map[string]string
}
