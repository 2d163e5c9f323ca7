package desired

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Resolver holds what Resolve needs to know besides the State.
type Resolver struct {
	// Node is the node that the data plane is on: any node, whatever the tracker's own is.
	Node changetracker.Node
	// MasqueradeAll replaces the source of every connection to a ClusterIP.
	MasqueradeAll bool
	// DetectsPods says whether pod traffic can be told from other traffic. Without
	// it, connections to a ClusterIP keep their source.
	DetectsPods bool
	// Kinds are the kinds of frontends that there are; empty means all.
	Kinds []Kind
	// EditSelection, if set, decides which endpoints a service port has on the Node, after
	// traffic policies, topology and the fallback to what terminates have: for local
	// redirect, affinity to a cluster, or endpoints of one's own. What it returns are
	// Cluster and Local, in any order, and Any: an empty list drops with Any and rejects
	// without. All is worked out anew. Endpoints without a valid address of the family are
	// left out. It must be pure and depend on nothing but the service port, its endpoints and
	// the Node: call changetracker.Tracker.Refresh when something else changes its answer.
	// It must not write to what it gets. Resolve calls it, so several goroutines may at once.
	EditSelection func(view changetracker.View, port *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection
	// DenyNodeExternalIPs refuses external IPs that are addresses of the Node. Those in
	// its PodCIDRs are refused in any case (CVE-2020-8554).
	DenyNodeExternalIPs bool
}

// has says whether there are frontends of a kind.
func (r *Resolver) has(kind Kind) bool { return len(r.Kinds) == 0 || slices.Contains(r.Kinds, kind) }

// refuses says whether an external IP would take the traffic of pods, or of the node.
func (r *Resolver) refuses(vip netip.Addr) bool {
	return contains(r.Node.PodCIDRs, vip) || r.DenyNodeExternalIPs && slices.Contains(r.Node.Addresses, vip)
}

// asks says whether a service port has a frontend at an address, if no other one gets it.
func (r *Resolver) asks(p *changetracker.ServicePort, vip netip.Addr) bool {
	_, asks := r.kindOf(p, vip)
	return asks
}

// kindOf is the kind of the frontend that a service port asks for at an address, or at a
// node port with the zero Addr. Of several the first one in the list of kinds counts.
func (r *Resolver) kindOf(p *changetracker.ServicePort, vip netip.Addr) (kind Kind, asks bool) {
	switch {
	case !vip.IsValid():
		return NodePort, p.NodePort != 0 && r.has(NodePort)
	case vip == p.ClusterIP && r.has(ClusterIP):
		return ClusterIP, true
	case containsAddr(p.LoadBalancerVIPs, vip) && r.has(LoadBalancer):
		return LoadBalancer, true
	default:
		return ExternalIP, containsAddr(p.ExternalIPs, vip) && r.has(ExternalIP) && !r.refuses(vip)
	}
}

func containsAddr(sorted []netip.Addr, a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(sorted, a, netip.Addr.Compare)
	return found
}

// keys are those of the frontends that a service port asks for, sorted; of a nil one none.
func (r *Resolver) keys(p *changetracker.ServicePort) []Key {
	if p == nil {
		return nil
	}
	protocol, ok := ProtocolOf(p.Name.Protocol)
	if !ok {
		return nil
	}
	keys := make([]Key, 0, 2+len(p.LoadBalancerVIPs)+len(p.ExternalIPs))
	if r.asks(p, netip.Addr{}) {
		keys = append(keys, Key{Protocol: protocol, Port: p.NodePort})
	}
	for _, list := range [...][]netip.Addr{{p.ClusterIP}, p.LoadBalancerVIPs, p.ExternalIPs} {
		for _, vip := range list {
			if vip.IsValid() && r.asks(p, vip) {
				keys = append(keys, Key{VIP: vip, Protocol: protocol, Port: p.Port})
			}
		}
	}
	slices.SortFunc(keys, Key.Compare)
	return slices.Compact(keys)
}
