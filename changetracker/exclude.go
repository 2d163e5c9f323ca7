package changetracker

import (
	"fmt"
	"slices"
)

// Exclusion is why Select leaves an endpoint out, in a few words. It is empty for an endpoint
// that is selected.
type Exclusion string

// The reasons to leave an endpoint out.
const (
	ExcludedNotReady    Exclusion = "not ready"
	ExcludedEjected     Exclusion = "ejected: its health checks fail, or the program said so"
	ExcludedMaintenance Exclusion = "in maintenance"
	ExcludedStandby     Exclusion = "of a group that does not serve now"
	ExcludedNotServing  Exclusion = "terminating, and serves no more"
	ExcludedDraining    Exclusion = "terminating, and others are ready"
	ExcludedElsewhere   Exclusion = "on another node"
	ExcludedByNodeHint  Exclusion = "hints give it to other nodes"
	ExcludedByZoneHint  Exclusion = "hints give it to other zones"
	// ExcludedByHook is for an endpoint that a hook leaves out after Select, such as
	// desired.Resolver.EditSelection.
	ExcludedByHook Exclusion = "the program's own rule leaves it out"
)

// ExplainCluster returns for each endpoint, in the order of the input, why it is not in
// Selection.Cluster. remarks say which group serves, how topology hints were used, and that terminating endpoints
// are used.
func ExplainCluster(p *ServicePort, endpoints []Endpoint, node Node) (why []Exclusion, remarks []string) {
	sum := summarise(endpoints, &node)
	serving := sum.serving(p.Failover)
	chosen := serving.clusterRule(&node)
	return explain(endpoints, chosen), remarksOf(sum.remark(p.Failover, serving), serving.clusterRemark(endpoints, &node, chosen))
}

// ExplainLocal is ExplainCluster for Selection.Local.
func ExplainLocal(p *ServicePort, endpoints []Endpoint, node Node) (why []Exclusion, remarks []string) {
	sum := summarise(endpoints, &node)
	serving := sum.serving(p.Failover)
	chosen := serving.localRule(&node)
	ends := ""
	if chosen.kind == drainingLocal && chosen.count > 0 {
		ends = "no endpoint on this node is ready, so those that terminate and still serve are used"
	}
	return explain(endpoints, chosen), remarksOf(sum.remark(p.Failover, serving), ends)
}

func remarksOf(all ...string) []string {
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

// remark says which group serves and why; it is empty if there is only one.
func (s *summary) remark(f Failover, serving *group) string {
	enough := "one ready endpoint is"
	if f.Share > 0 {
		enough = fmt.Sprintf("%d %% of its endpoints are", f.Share)
	}
	switch {
	case len(s.others) == 0:
		return ""
	case serving == &s.first:
		return fmt.Sprintf("group 0 of several serves, with %d of %d endpoints ready: %s enough", serving.ready, serving.expected, enough)
	default:
		return fmt.Sprintf("group %d serves, with %d of %d endpoints ready; group 0 has %d of %d: %s enough",
			serving.priority, serving.ready, serving.expected, s.first.ready, s.first.expected, enough)
	}
}

func explain(endpoints []Endpoint, chosen rule) []Exclusion {
	why := make([]Exclusion, len(endpoints))
	for i := range endpoints {
		why[i] = chosen.excludes(&endpoints[i])
	}
	return why
}

// excludes returns why the rule does not select the endpoint. The conditions of an endpoint
// come before its location.
func (r rule) excludes(e *Endpoint) Exclusion {
	switch {
	case r.selects(e):
		return ""
	case e.Ejected:
		return ExcludedEjected
	case e.Maintenance:
		return ExcludedMaintenance
	case e.Terminating && !e.Serving:
		return ExcludedNotServing
	case !e.Usable():
		return ExcludedNotReady
	case e.Priority != r.group:
		return ExcludedStandby
	case (r.kind == readyLocal || r.kind == drainingLocal) && !r.isLocal(e):
		return ExcludedElsewhere
	case !e.Ready:
		return ExcludedDraining
	case r.kind == readyForNode:
		return ExcludedByNodeHint
	default:
		return ExcludedByZoneHint
	}
}

// clusterRemark says why hints are not used although there are some, or that no endpoint is
// ready.
func (g *group) clusterRemark(endpoints []Endpoint, node *Node, chosen rule) string {
	switch {
	case chosen.kind == readyForNode:
		return fmt.Sprintf("hints choose the endpoints for node %s", node.Name)
	case chosen.kind == readyForZone:
		return fmt.Sprintf("hints choose the endpoints for zone %s", node.Zone)
	case chosen.kind == draining && g.draining > 0:
		return "no endpoint is ready, so those that terminate and still serve are used"
	case g.zoneHinted > 0 && g.zoneHinted < g.ready:
		return fmt.Sprintf("hints for zones do not count: %v has none", g.unhinted(endpoints))
	case g.zoneHinted > 0 && node.Zone == "":
		return "hints for zones do not count: the zone of this node is not known"
	case g.zoneHinted > 0:
		return fmt.Sprintf("hints for zones do not count: none is for zone %s", node.Zone)
	default:
		return ""
	}
}

// unhinted returns the first ready endpoint without a zone hint.
func (g *group) unhinted(endpoints []Endpoint) string {
	for i := range endpoints {
		if e := &endpoints[i]; e.Ready && e.Priority == g.priority && len(e.ZoneHints) == 0 {
			return endpoints[i].Addr.String()
		}
	}
	return "an endpoint"
}
