package changetracker

import (
	"maps"
	"net/netip"
	"slices"
)

// Node is the node that the proxy runs on. The zero value is a node without a name: nothing is
// local to it.
type Node struct {
	Name string
	// Zone is the value of the label topology.kubernetes.io/zone, or empty.
	Zone string
	// Addresses are the node's own addresses. The first one of each family is its primary
	// address.
	Addresses []netip.Addr
	// PodCIDRs are the ranges of the addresses of the node's own pods.
	PodCIDRs []netip.Prefix
	// Labels are those of the Node object, for ServicePort.ExposeOn. A change of labels is a change of the Services that
	// ask for others.
	Labels map[string]string
	// Draining is why load balancers should send no new connections to the node, which is about
	// to be removed; empty if they may (KEP-3836). It does not change what is programmed.
	Draining string
}

// canonical returns a copy of n that shares no memory with it, without invalid addresses and
// prefixes.
func (n *Node) canonical() Node {
	c := Node{Name: n.Name, Zone: n.Zone, Draining: n.Draining, Labels: maps.Clone(n.Labels)}
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

// equal compares the fields that programming always depends on: all except Draining and Labels.
func (n *Node) equal(o *Node) bool {
	return n.Name == o.Name && n.Zone == o.Zone &&
		slices.Equal(n.Addresses, o.Addresses) && slices.Equal(n.PodCIDRs, o.PodCIDRs)
}

// hosts reports whether an endpoint on the named node is local (EPS-16). Nothing is local to a
// node without a name.
func (n *Node) hosts(node string) bool { return n.Name != "" && n.Name == node }
