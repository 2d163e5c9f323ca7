package informer

import (
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// NodeOf reads what a proxy needs to know of its Node: the InternalIPs, then the
// ExternalIPs, as far as they are addresses, the zone of the well-known label, the
// ranges of the node's pods, and whether it is about to go away.
func NodeOf(node *v1.Node) changetracker.Node {
	n := changetracker.Node{Name: node.Name, Zone: node.Labels[v1.LabelTopologyZone], Draining: draining(node)}
	for _, kind := range []v1.NodeAddressType{v1.NodeInternalIP, v1.NodeExternalIP} {
		for _, a := range node.Status.Addresses {
			if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == kind {
				n.Addresses = append(n.Addresses, addr.Unmap())
			}
		}
	}
	for _, text := range podCIDRs(node) {
		if cidr, err := netip.ParsePrefix(text); err == nil {
			n.PodCIDRs = append(n.PodCIDRs, cidr.Masked())
		}
	}
	return n
}

// taintToBeDeleted is what the cluster autoscaler puts on a node before it removes
// it.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// draining says why a node gets nothing new from load balancers (HC-30).
func draining(node *v1.Node) string {
	if node.DeletionTimestamp != nil {
		return "the node is being deleted"
	}
	for i := range node.Spec.Taints {
		if node.Spec.Taints[i].Key == taintToBeDeleted {
			return "the node has the taint " + taintToBeDeleted
		}
	}
	return ""
}

// podCIDRs prefers the field that holds both families.
func podCIDRs(node *v1.Node) []string {
	if len(node.Spec.PodCIDRs) > 0 {
		return node.Spec.PodCIDRs
	}
	return []string{node.Spec.PodCIDR}
}
