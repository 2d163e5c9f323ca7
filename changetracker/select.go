package changetracker

import "slices"

// Selection is the outcome of Select: which endpoints the traffic of a service
// port may go to.
type Selection struct {
	// Cluster are the endpoints for traffic under policy Cluster, and for pods
	// and the node itself under externalTrafficPolicy Local. They are there also when no
	// frontend uses them; see ServicePort.UsesClusterEndpoints.
	Cluster []Endpoint
	// Local are the endpoints for traffic under policy Local. They are there also when no
	// frontend uses them: load balancers that answer clients directly need them under
	// policy Cluster too. See ServicePort.UsesLocalEndpoints.
	Local []Endpoint
	// All is the union of what frontends use of both, in the order of the input.
	All []Endpoint
	// Any says that at least one endpoint somewhere could take traffic. With an
	// empty Local it is what tells "drop" from "reject".
	Any bool
}

// Select decides which endpoints of a service port may take traffic on the given
// node: traffic policies, topology hints, and the fallback to endpoints that
// still serve while they terminate (KEP-1669). Only the Name and Zone of the node
// count; it may be any node. View.Select is Select for what a State has.
//
// It is pure. The lists of the result are in the order of the input and may share
// its memory; neither may be written to.
func Select(p *ServicePort, endpoints []Endpoint, node Node) Selection {
	if p == nil || len(endpoints) == 0 {
		return Selection{}
	}
	sum := summarise(endpoints, &node)
	cluster, local := sum.clusterRule(&node), sum.localRule(&node)
	s := Selection{
		Cluster: filter(endpoints, cluster.count, cluster), Local: filter(endpoints, local.count, local),
		Any: sum.ready > 0 || sum.draining > 0,
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

// summary counts what the rules depend on. Hints count only on ready endpoints.
type summary struct {
	ready, draining           int
	readyLocal, drainingLocal int
	nodeHinted, nodeMatched   int
	zoneHinted, zoneMatched   int
}

func summarise(endpoints []Endpoint, node *Node) (s summary) {
	for i := range endpoints {
		e := &endpoints[i]
		if e.draining() {
			s.draining++
			s.drainingLocal += count(node.hosts(e.Node))
		}
		if !e.Ready {
			continue
		}
		s.ready++
		s.readyLocal += count(node.hosts(e.Node))
		s.nodeHinted += count(len(e.NodeHints) > 0)
		s.nodeMatched += count(hinted(e.NodeHints, node.Name))
		s.zoneHinted += count(len(e.ZoneHints) > 0)
		s.zoneMatched += count(hinted(e.ZoneHints, node.Zone))
	}
	return s
}

// hinted says that a hint names the node or zone. A node that does not know its
// own name or zone is named by none.
func hinted(hints []string, name string) bool {
	return name != "" && slices.Contains(hints, name)
}

// rule is one way to select endpoints. It is data, not a func, so that Select
// allocates nothing but lists.
type rule struct {
	kind  ruleKind
	name  string // of the node or zone
	count int    // of the endpoints that it selects
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

// clusterRule tells the endpoints for policy Cluster. Hints bind only when every
// ready endpoint has some and one of them means us (TOP-08), so there is always
// an endpoint left.
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

// localRule tells the endpoints for policy Local (TOP-04).
func (s *summary) localRule(node *Node) rule {
	if s.readyLocal > 0 {
		return rule{kind: readyLocal, name: node.Name, count: s.readyLocal}
	}
	return rule{kind: drainingLocal, name: node.Name, count: s.drainingLocal}
}

// filter returns what any of the rules selects, in order, which is so many. It shares
// the input when that is all of it.
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
