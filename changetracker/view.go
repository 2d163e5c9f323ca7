package changetracker

import (
	"net/netip"

	"k8s.io/apimachinery/pkg/types"
)

// View is a State as one node sees it. It is a small value that copies nothing of the State,
// so one process can have the views of all nodes that it serves.
type View struct {
	state *State
	node  Node
}

// For returns the view of a node: the tracker's own or any other. Only the Name and Zone of
// the node matter. If a node changes, make a new View of it; the State and other views stay
// valid.
func (s *State) For(node Node) View { return View{state: s, node: node} }

// State returns the State of the View.
func (v View) State() *State { return v.state }

// Node returns the node of the View.
func (v View) Node() Node { return v.node }

// Local reports whether an endpoint runs on the node. It is false if the node or the endpoint has
// no node name.
func (v View) Local(e *Endpoint) bool { return v.node.hosts(e.Node) }

// Select decides which endpoints of a service port may receive traffic on the node, for both
// traffic policies; see the func Select. ok is false if the State has no such service port. It
// costs the endpoints of the service port.
func (v View) Select(name ServicePortName) (s Selection, ok bool) {
	p := v.state.find(name)
	if p == nil || p.port == nil {
		return Selection{}, false
	}
	return Select(p.port, p.endpoints.Slice(), v.node), true
}

// Choose is Select for callers that go through the endpoints themselves: it copies nothing. since
// is an earlier Choice for this service port, or nil. If it is of the same node, Choose costs what
// Choice.Changes visits, and otherwise all endpoints.
func (v View) Choose(name ServicePortName, since *Choice) (c Choice, ok bool) {
	p := v.state.find(name)
	if p == nil || p.port == nil {
		return Choice{}, false
	}
	if since == nil || since.node != v.node.Name || since.zone != v.node.Zone {
		since = &Choice{}
	}
	sum, now := since.sum.changeable(), Choice{endpoints: p.endpoints}
	now.Changes(since, func(before, after *Endpoint) {
		if before != nil {
			sum.count(before, &v.node, -1)
		}
		if after != nil {
			sum.count(after, &v.node, 1)
		}
	})
	c = sum.choice(p.port, &v.node)
	c.endpoints = p.endpoints
	return c, true
}

// LocalReady returns the number of distinct addresses of the ready endpoints of a Service on
// the node, over all its ports, and of the groups that serve. The health check of a load balancer reports it. An endpoint
// that serves while it terminates does not count. It costs the endpoints of the Service.
func (v View) LocalReady(name types.NamespacedName) int {
	service, _ := v.state.services.Get(name)
	var addrs []netip.Addr
	for _, p := range service.all() {
		serving := p.serving()
		for e := range p.endpoints.All {
			if last := len(addrs) - 1; e.Ready && e.Priority == serving && v.Local(e) && (last < 0 || addrs[last] != e.Addr.Addr()) {
				addrs = append(addrs, e.Addr.Addr())
			}
		}
	}
	return len(canonicalAddrs(addrs))
}
