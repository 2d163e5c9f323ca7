package changetracker

import (
	"slices"
)

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
