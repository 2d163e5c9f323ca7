package changetracker

import "slices"

// Selection is the outcome of Select: which endpoints the traffic of a service
// port may go to.
type Selection struct {
	// Cluster are the endpoints for traffic under policy Cluster, and for pods
	// and the node itself under externalTrafficPolicy Local. Nil when no frontend
	// uses them.
	Cluster []Endpoint
	// Local are the endpoints for traffic under policy Local. Nil when no
	// frontend uses them.
	Local []Endpoint
	// All is the union of both, in the order of the input.
	All []Endpoint
	// Any says that at least one endpoint somewhere could take traffic. With an
	// empty Local it is what tells "drop" from "reject".
	Any bool
}

// Select decides which endpoints of a service port may take traffic on the given
// node: traffic policies, topology hints, and the fallback to endpoints that
// still serve while they terminate (KEP-1669). Only the Name and Zone of the node
// count.
//
// It is pure. The lists of the result are in the order of the input and may share
// its memory; neither may be written to.
func Select(p *ServicePort, endpoints []Endpoint, node Node) Selection {
	if p == nil || len(endpoints) == 0 {
		return Selection{}
	}
	var s Selection
	sum := summarise(endpoints, &node)
	inCluster, inLocal := sum.clusterRule(&node), sum.localRule()
	if p.UsesClusterEndpoints() {
		s.Cluster = filter(endpoints, inCluster)
	}
	if !p.UsesLocalEndpoints() {
		s.All, s.Any = s.Cluster, len(s.Cluster) > 0
		return s
	}
	s.Local = filter(endpoints, inLocal)
	s.Any = sum.ready > 0 || sum.draining > 0
	switch outside := func(e Endpoint) bool { return !inCluster(&e) }; {
	case !p.UsesClusterEndpoints():
		s.All = s.Local
	case slices.ContainsFunc(s.Local, outside):
		s.All = filter(endpoints, func(e *Endpoint) bool { return inCluster(e) || inLocal(e) })
	default:
		s.All = s.Cluster
	}
	return s
}

// summary counts what the rules depend on. Hints count only on ready endpoints.
type summary struct {
	ready, draining         int
	readyLocal              int
	nodeHinted, nodeMatched int
	zoneHinted, zoneMatched int
}

func summarise(endpoints []Endpoint, node *Node) (s summary) {
	for i := range endpoints {
		e := &endpoints[i]
		if e.draining() {
			s.draining++
		}
		if !e.Ready {
			continue
		}
		s.ready++
		s.readyLocal += count(e.Local)
		s.nodeHinted += count(len(e.NodeHints) > 0)
		s.nodeMatched += count(hinted(e.NodeHints, node.Name))
		s.zoneHinted += count(len(e.ZoneHints) > 0)
		s.zoneMatched += count(hinted(e.ZoneHints, node.Zone))
	}
	return s
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// hinted says that a hint names the node or zone. A node that does not know its
// own name or zone is named by none.
func hinted(hints []string, name string) bool {
	return name != "" && slices.Contains(hints, name)
}

// draining says that the endpoint serves while it terminates.
func (e *Endpoint) draining() bool { return e.Serving && e.Terminating }

// clusterRule tells the endpoints for policy Cluster. Hints bind only when every
// ready endpoint has some and one of them means us (TOP-08), so there is always
// an endpoint left.
func (s *summary) clusterRule(node *Node) func(*Endpoint) bool {
	switch {
	case s.ready == 0:
		return (*Endpoint).draining
	case s.nodeHinted == s.ready && s.nodeMatched > 0:
		return func(e *Endpoint) bool { return e.Ready && slices.Contains(e.NodeHints, node.Name) }
	case s.zoneHinted == s.ready && s.zoneMatched > 0:
		return func(e *Endpoint) bool { return e.Ready && slices.Contains(e.ZoneHints, node.Zone) }
	default:
		return func(e *Endpoint) bool { return e.Ready }
	}
}

// localRule tells the endpoints for policy Local (TOP-04).
func (s *summary) localRule() func(*Endpoint) bool {
	if s.readyLocal > 0 {
		return func(e *Endpoint) bool { return e.Local && e.Ready }
	}
	return func(e *Endpoint) bool { return e.Local && e.draining() }
}

// filter keeps the order, and shares the input when all of it is kept.
func filter(endpoints []Endpoint, keep func(*Endpoint) bool) []Endpoint {
	kept := 0
	for i := range endpoints {
		kept += count(keep(&endpoints[i]))
	}
	switch kept {
	case 0:
		return nil
	case len(endpoints):
		return slices.Clip(endpoints)
	}
	list := make([]Endpoint, 0, kept)
	for i := range endpoints {
		if keep(&endpoints[i]) {
			list = append(list, endpoints[i])
		}
	}
	return list
}
