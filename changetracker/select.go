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

// Failover says which of the groups of Endpoint.Priority serves: the first one with enough ready
// endpoints; if none has enough, the first one with a ready endpoint; if there is none, the first one with an endpoint
// that serves while it terminates. All else, such as traffic policies, is about the group that serves.
type Failover struct {
	// Share is how many of a group's endpoints are enough, in percent. Endpoints that terminate or are in
	// maintenance do not count. 0 means that one is enough.
	Share uint8
	// End ends open connections to the endpoints of a group when another one serves: flows of UDP, and with
	// EndConnections those of TCP. Otherwise they stay.
	End bool
}

// Enough reports whether so many ready endpoints are enough of a group's endpoints, without those that terminate or are
// in maintenance.
func (f Failover) Enough(ready, endpoints int) bool {
	return ready > 0 && ready*maxShare >= int(f.Share)*endpoints
}

// maxShare is a Failover.Share of all endpoints.
const maxShare = 100

// Select decides which endpoints of a service port may receive traffic on a node: the group that
// serves, then traffic policies, topology hints, and the fallback to endpoints that serve while they
// terminate (KEP-1669). Only the Name and Zone of the node matter. It may be any node. View.Select is
// Select for the endpoints of a State.
//
// It is pure. The lists of the result are in the order of the input and may share its memory.
// Neither may be changed.
func Select(p *ServicePort, endpoints []Endpoint, node Node) Selection {
	if p == nil || len(endpoints) == 0 {
		return Selection{}
	}
	sum := summarise(endpoints, &node)
	c := sum.choice(p, &node)
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
	ends           bool // of Failover.End; if no group serves, all connections stay
	endpoints      endpointList
	node, zone     string // for which it is
	sum            summary
}

func (s *summary) choice(p *ServicePort, node *Node) Choice {
	group := s.serving(p.Failover)
	anyServes := group.rank(p.Failover) > 0
	return Choice{
		Any: anyServes, cluster: group.clusterRule(node), local: group.localRule(node),
		ends: anyServes && p.Failover.End, node: node.Name, zone: node.Zone, sum: *s,
	}
}

// Cluster reports whether an endpoint is in Selection.Cluster.
func (c *Choice) Cluster(e *Endpoint) bool { return c.cluster.selects(e) }

// Local reports whether an endpoint is in Selection.Local.
func (c *Choice) Local(e *Endpoint) bool { return c.local.selects(e) }

// Ends reports whether open connections to an endpoint are to end because its group does not serve.
func (c *Choice) Ends(e *Endpoint) bool { return c.ends && e.Priority != c.cluster.group }

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
	return c.node == o.node && c.zone == o.zone && c.ends == o.ends && c.cluster.group == o.cluster.group &&
		c.cluster.kind == o.cluster.kind && c.local.kind == o.local.kind
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

// summary counts what the rules depend on.
type summary struct {
	first    group   // of Priority 0
	others   []group // sorted; copies of the summary share it
	weighted int
}

// group counts the endpoints of a Priority. Only hints of ready endpoints count.
type group struct {
	priority                  uint8
	expected                  int // that should be ready: all but those that terminate or are in maintenance
	ready, draining           int
	readyLocal, drainingLocal int
	nodeHinted, nodeMatched   int
	zoneHinted, zoneMatched   int
}

func summarise(endpoints []Endpoint, node *Node) (s summary) {
	for i := range endpoints {
		s.count(&endpoints[i], node, 1)
	}
	return s
}

// count adds an endpoint n times.
func (s *summary) count(e *Endpoint, node *Node, n int) {
	s.weighted += n * count(e.share() > 1)
	s.of(e.Priority).count(e, node, n)
}

// of returns the group with a priority.
func (s *summary) of(priority uint8) *group {
	if priority == 0 {
		return &s.first
	}
	i, found := slices.BinarySearchFunc(s.others, priority, func(g group, p uint8) int { return int(g.priority) - int(p) })
	if !found {
		s.others = slices.Insert(s.others, i, group{priority: priority})
	}
	return &s.others[i]
}

// changeable returns a copy that shares nothing, without empty groups.
func (s *summary) changeable() summary {
	c := *s
	c.others = slices.DeleteFunc(slices.Clone(s.others), func(g group) bool { return g == group{priority: g.priority} })
	return c
}

// serving returns the group that serves: see Failover. Without endpoints it is the first one.
func (s *summary) serving(f Failover) *group {
	best := &s.first
	for i := range s.others {
		if g := &s.others[i]; g.rank(f) > best.rank(f) {
			best = g
		}
	}
	return best
}

// rank says how well a group can serve; 0 is not at all.
func (g *group) rank(f Failover) int {
	switch {
	case f.Enough(g.ready, g.expected):
		return 3
	case g.ready > 0:
		return 2
	case g.draining > 0:
		return 1
	}
	return 0
}

// count adds an endpoint n times.
func (g *group) count(e *Endpoint, node *Node, n int) {
	local := n * count(node.hosts(e.Node))
	g.expected += n * count(!e.Terminating && !e.Maintenance)
	if e.draining() {
		g.draining += n
		g.drainingLocal += local
	}
	if !e.Ready {
		return
	}
	g.ready += n
	g.readyLocal += local
	g.nodeHinted += n * count(len(e.NodeHints) > 0)
	g.nodeMatched += n * count(hinted(e.NodeHints, node.Name))
	g.zoneHinted += n * count(len(e.ZoneHints) > 0)
	g.zoneMatched += n * count(hinted(e.ZoneHints, node.Zone))
}

// hinted reports whether a hint names the node or zone. Without a name, nothing matches.
func hinted(hints []string, name string) bool {
	return name != "" && slices.Contains(hints, name)
}

// rule is one way to select endpoints. It is data and not a func, so that Select allocates
// only lists.
type rule struct {
	kind  ruleKind
	group uint8  // its Priority
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
	if e.Priority != r.group {
		return false
	}
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
func (g *group) clusterRule(node *Node) rule {
	switch {
	case g.ready == 0:
		return rule{kind: draining, group: g.priority, count: g.draining}
	case g.nodeHinted == g.ready && g.nodeMatched > 0:
		return rule{kind: readyForNode, group: g.priority, name: node.Name, count: g.nodeMatched}
	case g.zoneHinted == g.ready && g.zoneMatched > 0:
		return rule{kind: readyForZone, group: g.priority, name: node.Zone, count: g.zoneMatched}
	default:
		return rule{kind: ready, group: g.priority, count: g.ready}
	}
}

// localRule returns the rule for policy Local (TOP-04).
func (g *group) localRule(node *Node) rule {
	if g.readyLocal > 0 {
		return rule{kind: readyLocal, group: g.priority, name: node.Name, count: g.readyLocal}
	}
	return rule{kind: drainingLocal, group: g.priority, name: node.Name, count: g.drainingLocal}
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
