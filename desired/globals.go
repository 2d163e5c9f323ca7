package desired

import (
	"net/netip"
	"slices"
)

// Globals is what all Services of one family share and what may change while the
// proxy runs. Prefixes are masked, sorted, and none contains another.
type Globals struct {
	// ServiceCIDRs are the ranges that ClusterIPs come from. New connections to an
	// address in them that no Service has are dropped. Empty drops nothing.
	ServiceCIDRs []netip.Prefix
	// NodePortAddresses are the node addresses that accept node ports; a /0 stands
	// for every local address but loopback, and empty for none.
	NodePortAddresses []netip.Prefix
	// NodeAddresses are the node's addresses, most important first, as far as the
	// embedding program has told them.
	NodeAddresses []netip.Addr
	// PodCIDRs are the sources that count as pods, when the local detector works
	// by address. Empty when it does not, or when there are none in this family.
	PodCIDRs []netip.Prefix
	// PodInterface is the name of the interface that pod traffic arrives from, with
	// a trailing "*" for a name prefix; empty when the detector works by address.
	PodInterface string
}

// Equal says whether two Globals are the same.
func (g *Globals) Equal(o *Globals) bool {
	return slices.Equal(g.ServiceCIDRs, o.ServiceCIDRs) && slices.Equal(g.NodePortAddresses, o.NodePortAddresses) &&
		slices.Equal(g.NodeAddresses, o.NodeAddresses) && slices.Equal(g.PodCIDRs, o.PodCIDRs) && g.PodInterface == o.PodInterface
}

// DetectsPods says whether there is any way to tell pod traffic. Without it no
// traffic is ever taken for a pod's.
func (g *Globals) DetectsPods() bool { return len(g.PodCIDRs) > 0 || g.PodInterface != "" }

// SameDetection says whether pods are told apart in the same way. The ranges that
// they come from may differ.
func (g *Globals) SameDetection(o *Globals) bool {
	return g.DetectsPods() == o.DetectsPods() && g.PodInterface == o.PodInterface
}

// AcceptsNodePorts says whether an address is one of NodeAddresses that accept node
// ports. The node may have others that NodeAddresses does not list.
func (g *Globals) AcceptsNodePorts(a netip.Addr) bool {
	return !a.IsLoopback() && contains(g.NodePortAddresses, a) && slices.Contains(g.NodeAddresses, a)
}
