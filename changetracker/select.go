package changetracker

import (
	"slices"

	"github.com/serviceplane/serviceplane/internal/sorted"
)

// Selection is the result of Select: the endpoints that may receive the traffic of a service
// port.
type Selection struct {
	// Cluster are the endpoints for traffic policy Cluster, and for pods and the node itself
	// under externalTrafficPolicy Local. They are set even if no frontend uses them; see
	// ServicePort.UsesClusterEndpoints.
	Cluster []Endpoint
	// Local are the endpoints for traffic policy Local. They are set even if no frontend uses
	// them, because load balancers that answer clients directly also need them under policy
	// Cluster. See ServicePort.UsesLocalEndpoints.
	Local []Endpoint
	// All is the union of the endpoints that frontends use, in the order of the input.
	All []Endpoint
	// Any reports whether at least one endpoint on any node can take traffic. If Local is empty,
	// it decides between drop (true) and reject (false).
	Any bool
}

// Select decides which endpoints of a service port may receive traffic on a node: traffic
// policies, topology hints, and the fallback to endpoints that serve while they terminate
// (KEP-1669). Only the Name and Zone of the node matter. It may be any node. View.Select is
// Select for the endpoints of a State.
//
// It is pure. The lists of the result are in the order of the input and may share its memory.
// Neither may be changed.
func Select(p *ServicePort, endpoints []Endpoint, node Node) Selection {
	if p == nil || len(endpoints) == 0 {
		return Selection{}
	}
	sum := summarise(endpoints, &node)
	c := sum.choice(&node)
	cluster, local := c.cluster, c.local
	s := Selection{
		Cluster: filter(endpoints, cluster.count, cluster), Local: filter(endpoints, local.count, local),
		Any: c.Any,
	}
	switch {
	case !p.UsesLocalEndpoints():
		s.All = s.Cluster
	case !p.UsesClusterEndpoints():
		s.All = s.Local
	default:
		only := 0 // in Local
		for i := range s.Local {
			only += count(!cluster.selects(&s.Local[i]))
		}
		if s.All = s.Cluster; only > 0 {
			s.All = filter(endpoints, cluster.count+only, cluster, local)
		}
	}
	return s
}

// Choice is what Select decides about each endpoint of a service port, without lists of them. See
// View.Choose. It is immutable.
type Choice struct {
	// Any is as in Selection.
	Any bool

	cluster, local rule
	endpoints      endpointList
	node, zone     string // for which it is
	sum            summary
}

func (s *summary) choice(node *Node) Choice {
	return Choice{Any: s.ready > 0 || s.draining > 0, cluster: s.clusterRule(node), local: s.localRule(node), node: node.Name, zone: node.Zone, sum: *s}
}

// Cluster reports whether an endpoint is in Selection.Cluster.
func (c *Choice) Cluster(e *Endpoint) bool { return c.cluster.selects(e) }

// Local reports whether an endpoint is in Selection.Local.
func (c *Choice) Local(e *Endpoint) bool { return c.local.selects(e) }

// Len returns the number of all endpoints, and the lengths of Selection.Cluster and Selection.Local.
func (c *Choice) Len() (all, cluster, local int) {
	return c.endpoints.Len(), c.cluster.count, c.local.count
}

// Terminating reports whether the endpoints of Selection.Cluster, and those of Selection.Local, serve
// while they terminate because no better one is there.
func (c *Choice) Terminating() (cluster, local bool) {
	ends := func(r rule) bool { return r.count > 0 && (r.kind == draining || r.kind == drainingLocal) }
	return ends(c.cluster), ends(c.local)
}

// Weighted reports whether some endpoint has a Weight above 1.
func (c *Choice) Weighted() bool { return c.sum.weighted > 0 }

// SameRules reports whether two Choices decide in the same way, if an endpoint is in both.
func (c *Choice) SameRules(o *Choice) bool {
	return c.node == o.node && c.zone == o.zone && c.cluster.kind == o.cluster.kind && c.local.kind == o.local.kind
}

// Changes visits all endpoints that differ from those of an earlier Choice, in order, and maybe
// some that do not: as they were and as they are, nil if there is none. Between States of one
// tracker, it costs about what has changed. For the zero Choice, it visits all endpoints of c.
//
// It is not inlined, so that callers in other packages know that visit does not escape.
//
//go:noinline
func (c *Choice) Changes(since *Choice, visit func(before, after *Endpoint)) {
	sorted.Walk(&since.endpoints, &c.endpoints, byAddr, visit)
}

// summary counts what the rules depend on. Only hints of ready endpoints count.
type summary struct {
	ready, draining           int
	readyLocal, drainingLocal int
	nodeHinted, nodeMatched   int
	zoneHinted, zoneMatched   int
	weighted                  int
}

func summarise(endpoints []Endpoint, node *Node) (s summary) {
	for i := range endpoints {
		s.count(&endpoints[i], node, 1)
	}
	return s
}

// count adds an endpoint n times.
func (s *summary) count(e *Endpoint, node *Node, n int) {
	local := n * count(node.hosts(e.Node))
	s.weighted += n * count(e.share() > 1)
	if e.draining() {
		s.draining += n
		s.drainingLocal += local
	}
	if !e.Ready {
		return
	}
	s.ready += n
	s.readyLocal += local
	s.nodeHinted += n * count(len(e.NodeHints) > 0)
	s.nodeMatched += n * count(hinted(e.NodeHints, node.Name))
	s.zoneHinted += n * count(len(e.ZoneHints) > 0)
	s.zoneMatched += n * count(hinted(e.ZoneHints, node.Zone))
}

// hinted reports whether a hint names the node or zone. Without a name, nothing matches.
func hinted(hints []string, name string) bool {
	return name != "" && slices.Contains(hints, name)
}

// rule is one way to select endpoints. It is data and not a func, so that Select allocates
// only lists.
type rule struct {
	kind  ruleKind
	name  string // of the node or zone
	count int    // of selected endpoints
}

type ruleKind int

const (
	ready ruleKind = iota
	readyForNode
	readyForZone
	readyLocal
	draining
	drainingLocal
)

func (r rule) selects(e *Endpoint) bool {
	switch r.kind {
	case ready:
		return e.Ready
	case readyForNode:
		return e.Ready && hinted(e.NodeHints, r.name)
	case readyForZone:
		return e.Ready && hinted(e.ZoneHints, r.name)
	case readyLocal:
		return e.Ready && r.isLocal(e)
	case draining:
		return e.draining()
	case drainingLocal:
		return e.draining() && r.isLocal(e)
	}
	return false
}

func (r rule) isLocal(e *Endpoint) bool { return r.name != "" && e.Node == r.name }

// clusterRule returns the rule for policy Cluster. Hints are used only if every ready endpoint
// has some and one of them names this node or zone (TOP-08), so at least one endpoint remains.
func (s *summary) clusterRule(node *Node) rule {
	switch {
	case s.ready == 0:
		return rule{kind: draining, count: s.draining}
	case s.nodeHinted == s.ready && s.nodeMatched > 0:
		return rule{kind: readyForNode, name: node.Name, count: s.nodeMatched}
	case s.zoneHinted == s.ready && s.zoneMatched > 0:
		return rule{kind: readyForZone, name: node.Zone, count: s.zoneMatched}
	default:
		return rule{kind: ready, count: s.ready}
	}
}

// localRule returns the rule for policy Local (TOP-04).
func (s *summary) localRule(node *Node) rule {
	if s.readyLocal > 0 {
		return rule{kind: readyLocal, name: node.Name, count: s.readyLocal}
	}
	return rule{kind: drainingLocal, name: node.Name, count: s.drainingLocal}
}

// filter returns the endpoints that any of the rules selects, in order. Their number is known.
// It shares the input if all are selected.
func filter(endpoints []Endpoint, selected int, rules ...rule) []Endpoint {
	switch selected {
	case 0:
		return nil
	case len(endpoints):
		return slices.Clip(endpoints)
	}
	list := make([]Endpoint, 0, selected)
	for i := 0; len(list) < selected; i++ {
		if anySelects(rules, &endpoints[i]) {
			list = append(list, endpoints[i])
		}
	}
	return list
}

func anySelects(rules []rule, e *Endpoint) bool {
	for _, r := range rules {
		if r.selects(e) {
			return true
		}
	}
	return false
}
