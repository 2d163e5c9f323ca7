package desired

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Resolver holds the input of Resolve besides the State.
type Resolver struct {
	// Node is the node of the data plane. It may be any node, not only the tracker's own.
	Node changetracker.Node
	// MasqueradeAll replaces the source of every connection to a ClusterIP.
	MasqueradeAll bool
	// DetectsPods reports whether pod traffic can be detected. Without it, connections to a
	// ClusterIP keep their source.
	DetectsPods bool
	// Kinds are the kinds of frontends to program; empty means all.
	Kinds []Kind
	// EditSelection, if set, decides which endpoints a service port has on the Node, after
	// traffic policies, topology and the fallback to terminating endpoints: for local redirect,
	// affinity to a cluster, or endpoints from another source. It returns Cluster and Local, in
	// any order, and Any: an empty list drops if Any is set and rejects otherwise. All is
	// recomputed. Endpoints without a valid address of the family are ignored. It must be pure
	// and depend only on the service port, its endpoints and the Node: call
	// changetracker.Tracker.Refresh if something else changes its result. It must not change
	// its arguments. Resolve calls it, so several goroutines may run it at once.
	EditSelection func(view changetracker.View, port *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection
	// DenyNodeExternalIPs refuses external IPs that are addresses of the Node. Those in its
	// PodCIDRs are always refused, and so are load balancer IPs (CVE-2020-8554).
	DenyNodeExternalIPs bool
	// ReservedExternalIPs are addresses and TCP ports that no external IP gets.
	ReservedExternalIPs []netip.AddrPort
}

// equal reports whether two Resolvers are known to decide alike.
func (r *Resolver) equal(o *Resolver) bool {
	return r.EditSelection == nil && o.EditSelection == nil && r.MasqueradeAll == o.MasqueradeAll && r.DetectsPods == o.DetectsPods &&
		r.Node.Name == o.Node.Name && r.Node.Zone == o.Node.Zone
}

// has reports whether frontends of a kind are programmed.
func (r *Resolver) has(kind Kind) bool { return len(r.Kinds) == 0 || slices.Contains(r.Kinds, kind) }

// refuses reports whether a VIP would take over traffic to pods; or, as an external IP, traffic to the node
// or to a reserved address.
func (r *Resolver) refuses(kind Kind, p *changetracker.ServicePort, vip netip.Addr) bool {
	switch {
	case contains(r.Node.PodCIDRs, vip):
		return true
	case kind != ExternalIP:
		return false
	case p.Name.Protocol == v1.ProtocolTCP && slices.Contains(r.ReservedExternalIPs, netip.AddrPortFrom(vip, p.Port)):
		return true
	default:
		return r.DenyNodeExternalIPs && slices.Contains(r.Node.Addresses, vip)
	}
}

// claims reports whether a service port has a frontend at an address, unless another one wins it.
func (r *Resolver) claims(p *changetracker.ServicePort, vip netip.Addr) bool {
	_, asks := r.kindOf(p, vip)
	return asks
}

// kindOf returns the kind of the frontend that a service port claims at an address, or at its
// node port for the zero Addr. If there are several kinds the first in the list of kinds
// counts.
func (r *Resolver) kindOf(p *changetracker.ServicePort, vip netip.Addr) (kind Kind, asks bool) {
	switch {
	case !vip.IsValid():
		return NodePort, p.NodePort != 0 && r.has(NodePort)
	case vip == p.ClusterIP && r.has(ClusterIP):
		return ClusterIP, true
	case containsAddr(p.LoadBalancerVIPs, vip) && r.has(LoadBalancer) && !r.refuses(LoadBalancer, p, vip):
		return LoadBalancer, true
	default:
		return ExternalIP, containsAddr(p.ExternalIPs, vip) && r.has(ExternalIP) && !r.refuses(ExternalIP, p, vip)
	}
}

func containsAddr(sorted []netip.Addr, a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(sorted, a, netip.Addr.Compare)
	return found
}

// keys returns the Keys of the frontends that a service port claims, sorted; none for nil.
func (r *Resolver) keys(p *changetracker.ServicePort) []Key {
	if p == nil {
		return nil
	}
	protocol, ok := ProtocolOf(p.Name.Protocol)
	if !ok {
		return nil
	}
	keys := make([]Key, 0, 2+len(p.LoadBalancerVIPs)+len(p.ExternalIPs))
	if r.claims(p, netip.Addr{}) {
		keys = append(keys, Key{Protocol: protocol, Port: p.NodePort})
	}
	for _, list := range [...][]netip.Addr{{p.ClusterIP}, p.LoadBalancerVIPs, p.ExternalIPs} {
		for _, vip := range list {
			if vip.IsValid() && r.claims(p, vip) {
				keys = append(keys, Key{VIP: vip, Protocol: protocol, Port: p.Port})
			}
		}
	}
	slices.SortFunc(keys, Key.Compare)
	return slices.Compact(keys)
}
