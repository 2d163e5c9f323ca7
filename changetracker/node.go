package changetracker

import (
	"net/netip"
	"slices"
)

// Node is what the proxy knows about the node it runs on. The zero value is a
// node without name: nothing is local to it.
type Node struct {
	Name string
	// Zone is the value of the label topology.kubernetes.io/zone, or empty.
	Zone string
	// Addresses are the node's own addresses; the first one of each family is
	// its primary address.
	Addresses []netip.Addr
	// PodCIDRs are the ranges that the node's own pods take their addresses from.
	PodCIDRs []netip.Prefix
	// Draining says why load balancers should give the node nothing new, because it
	// is about to go away; empty when it is not (KEP-3836). What is programmed does
	// not depend on it.
	Draining string
}

// canonical is a copy of n that shares no memory with it, without addresses that
// no node can have.
func (n *Node) canonical() Node {
	c := Node{Name: n.Name, Zone: n.Zone, Draining: n.Draining}
	for _, a := range n.Addresses {
		if a = a.Unmap(); dialable(a) {
			c.Addresses = append(c.Addresses, a)
		}
	}
	for _, p := range n.PodCIDRs {
		if p.IsValid() {
			c.PodCIDRs = append(c.PodCIDRs, canonicalPrefix(p))
		}
	}
	return c
}

// equal compares what programming depends on: all but Draining.
func (n *Node) equal(o *Node) bool {
	return n.Name == o.Name && n.Zone == o.Zone &&
		slices.Equal(n.Addresses, o.Addresses) && slices.Equal(n.PodCIDRs, o.PodCIDRs)
}

// hosts says that an endpoint of the named node is local (EPS-16): none is to a node
// without a name.
func (n *Node) hosts(node string) bool { return n.Name != "" && n.Name == node }
