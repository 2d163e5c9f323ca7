package desired

import (
	"net/netip"
	"slices"
)

// Globals are the settings that all Services of one family share and that may change while the
// proxy runs. Prefixes are masked, sorted, and none contains another.
type Globals struct {
	// ServiceCIDRs are the ranges of ClusterIPs. New connections to an address in them that no
	// Service has are dropped. Empty drops nothing.
	ServiceCIDRs []netip.Prefix
	// NodePortAddresses are the node addresses that accept node ports. A /0 means every local
	// address except loopback; empty means none.
	NodePortAddresses []netip.Prefix
	// LocalhostNodePorts asks for node ports at 127.0.0.1 or ::1 too, from engines that serve
	// them there with sockets (Traits.LocalhostSockets). Whether rules of an engine accept them
	// depends on NodePortAddresses and Traits.LoopbackNodePorts alone.
	LocalhostNodePorts bool
	// NodeAddresses are the node's addresses that the embedding program has set, the most
	// important first.
	NodeAddresses []netip.Addr
	// PodCIDRs are the source ranges of pods, if the local detector works by address. Empty if
	// it does not, or if there are none in this family.
	PodCIDRs []netip.Prefix
	// PodInterface is the name of the interface that pod traffic arrives on, with a trailing
	// "*" for a name prefix. Empty if the local detector works by address.
	PodInterface string
}

// Equal reports whether two Globals are the same.
func (g *Globals) Equal(o *Globals) bool {
	return slices.Equal(g.ServiceCIDRs, o.ServiceCIDRs) && slices.Equal(g.NodePortAddresses, o.NodePortAddresses) &&
		g.LocalhostNodePorts == o.LocalhostNodePorts && slices.Equal(g.NodeAddresses, o.NodeAddresses) && slices.Equal(g.PodCIDRs, o.PodCIDRs) && g.PodInterface == o.PodInterface
}

// DetectsPods reports whether pod traffic can be detected. Without that, no traffic counts as a
// pod's.
func (g *Globals) DetectsPods() bool { return len(g.PodCIDRs) > 0 || g.PodInterface != "" }

// SameDetection reports whether pods are detected in the same way. Their ranges may differ.
func (g *Globals) SameDetection(o *Globals) bool {
	return g.DetectsPods() == o.DetectsPods() && g.PodInterface == o.PodInterface
}

// TakesNodePorts reports whether an address accepts node ports, if it is the node's: see AcceptsNodePorts.
func (g *Globals) TakesNodePorts(a netip.Addr) bool {
	return !a.IsLoopback() && contains(g.NodePortAddresses, a)
}

// AcceptsNodePorts reports whether an address is one of NodeAddresses that accept node ports. The
// node may have other addresses.
func (g *Globals) AcceptsNodePorts(a netip.Addr) bool {
	return g.TakesNodePorts(a) && slices.Contains(g.NodeAddresses, a)
}
