package changetracker

import (
	"net/netip"

	"k8s.io/apimachinery/pkg/types"
)

// View is what a State means for one node. It is a small value, and copies nothing of the
// State, so that one process can have the views of all nodes that it serves.
type View struct {
	state *State
	node  Node
}

// For returns the State as a node sees it, the tracker's own or any other. Only the Name
// and Zone of the node count. A View of a node that has changed is made anew; the State is
// the same, and so are the views of others.
func (s *State) For(node Node) View { return View{state: s, node: node} }

// State is what the View is of.
func (v View) State() *State { return v.state }

// Node is whose View it is.
func (v View) Node() Node { return v.node }

// Local says whether an endpoint runs on the node. None is local to a node without a name,
// and one without a Node is local to none.
func (v View) Local(e *Endpoint) bool { return v.node.hosts(e.Node) }

// Select decides which endpoints of a service port may take traffic on the node, for both
// traffic policies; see the func Select. ok is false when the State has no such service
// port. It costs the endpoints of the service port.
func (v View) Select(name ServicePortName) (s Selection, ok bool) {
	p := v.state.find(name)
	if p == nil || p.port == nil {
		return Selection{}, false
	}
	return Select(p.port, p.endpoints, v.node), true
}

// LocalReady is the number of distinct addresses among the ready endpoints of a
// Service on the node, over all its ports: what a load balancer's health check
// asks for. An endpoint that is terminating but serves still is not counted. It costs the
// endpoints of the Service.
func (v View) LocalReady(name types.NamespacedName) int {
	service, _ := v.state.services.Get(name)
	var addrs []netip.Addr
	for _, p := range service.all() {
		for i := range p.endpoints {
			e := &p.endpoints[i]
			if last := len(addrs) - 1; e.Ready && v.Local(e) && (last < 0 || addrs[last] != e.Addr.Addr()) {
				addrs = append(addrs, e.Addr.Addr())
			}
		}
	}
	return len(canonicalAddrs(addrs))
}
