package programmed

import (
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// NodePolicy chooses the nodes that must have a ServiceChange. The zero NodePolicy is the safe one: all nodes,
// because also a node that is not ready may still send connections. A node that is gone, or that
// its administrator called shut down by the taint node.kubernetes.io/out-of-service, never counts.
type NodePolicy struct {
	// Selector chooses nodes by their labels; nil chooses all. Set it if some nodes run another
	// proxy, or none: to the nodeSelector of the proxy's DaemonSet. Whether the proxy has a pod on
	// the node says less: while an update replaces the pod, the node has none, but its rules.
	Selector labels.Selector
	// NotReadyFor is how long a node may be not Ready before it does not count any more; 0 means
	// forever. The kernel of a node whose kubelet is silent may still send connections.
	NotReadyFor time.Duration
}

// Counts reports whether a node must have a ServiceChange.
func (p *NodePolicy) Counts(node *v1.Node, now time.Time) bool {
	if p.Selector != nil && !p.Selector.Matches(labels.Set(node.Labels)) {
		return false
	}
	if slices.ContainsFunc(node.Spec.Taints, func(t v1.Taint) bool { return t.Key == v1.TaintNodeOutOfService }) {
		return false
	}
	return p.NotReadyFor == 0 || now.Sub(readyUntil(node, now)) < p.NotReadyFor
}

// readyUntil returns when a node was Ready for the last time, as far as its conditions say.
func readyUntil(node *v1.Node, now time.Time) time.Time {
	for _, c := range node.Status.Conditions {
		switch {
		case c.Type != v1.NodeReady:
		case c.Status == v1.ConditionTrue:
			return now
		default:
			return c.LastTransitionTime.Time
		}
	}
	return node.CreationTimestamp.Time
}
