package changetracker

import "fmt"

// Exclusion is why Select leaves an endpoint out, in a few words. It is empty for an endpoint
// that is selected.
type Exclusion string

// The reasons to leave an endpoint out.
const (
	ExcludedNotReady   Exclusion = "not ready"
	ExcludedEjected    Exclusion = "ejected: its health checks fail, or the program said so"
	ExcludedNotServing Exclusion = "terminating, and serves no more"
	ExcludedDraining   Exclusion = "terminating, and others are ready"
	ExcludedElsewhere  Exclusion = "on another node"
	ExcludedByNodeHint Exclusion = "hints give it to other nodes"
	ExcludedByZoneHint Exclusion = "hints give it to other zones"
	// ExcludedByHook is for an endpoint that a hook leaves out after Select, such as
	// desired.Resolver.EditSelection.
	ExcludedByHook Exclusion = "the program's own rule leaves it out"
)

// ExplainCluster returns for each endpoint, in the order of the input, why it is not in
// Selection.Cluster. remark says how topology hints were used, or that terminating endpoints
// are used; it is empty otherwise.
func ExplainCluster(endpoints []Endpoint, node Node) (why []Exclusion, remark string) {
	sum := summarise(endpoints, &node)
	chosen := sum.clusterRule(&node)
	return explain(endpoints, chosen), sum.clusterRemark(endpoints, &node, chosen)
}

// ExplainLocal is ExplainCluster for Selection.Local.
func ExplainLocal(endpoints []Endpoint, node Node) (why []Exclusion, remark string) {
	sum := summarise(endpoints, &node)
	chosen := sum.localRule(&node)
	why = explain(endpoints, chosen)
	if chosen.kind == drainingLocal && chosen.count > 0 {
		remark = "no endpoint on this node is ready, so those that terminate and still serve are used"
	}
	return why, remark
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
	case e.Terminating && !e.Serving:
		return ExcludedNotServing
	case !e.Usable():
		return ExcludedNotReady
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
func (s *summary) clusterRemark(endpoints []Endpoint, node *Node, chosen rule) string {
	switch {
	case chosen.kind == readyForNode:
		return fmt.Sprintf("hints choose the endpoints for node %s", node.Name)
	case chosen.kind == readyForZone:
		return fmt.Sprintf("hints choose the endpoints for zone %s", node.Zone)
	case chosen.kind == draining && s.draining > 0:
		return "no endpoint is ready, so those that terminate and still serve are used"
	case s.zoneHinted > 0 && s.zoneHinted < s.ready:
		return fmt.Sprintf("hints for zones do not count: %v has none", unhinted(endpoints))
	case s.zoneHinted > 0 && node.Zone == "":
		return "hints for zones do not count: the zone of this node is not known"
	case s.zoneHinted > 0:
		return fmt.Sprintf("hints for zones do not count: none is for zone %s", node.Zone)
	default:
		return ""
	}
}

// unhinted returns the first ready endpoint without a zone hint.
func unhinted(endpoints []Endpoint) string {
	for i := range endpoints {
		if endpoints[i].Ready && len(endpoints[i].ZoneHints) == 0 {
			return endpoints[i].Addr.String()
		}
	}
	return "an endpoint"
}
