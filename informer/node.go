package informer

import (
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// NodeOf converts a Node: the InternalIPs, then the ExternalIPs, without those that are
// no addresses, the zone of the well-known label, the pod CIDRs, the labels, and whether the node is
// draining.
func NodeOf(node *v1.Node) changetracker.Node {
	n := changetracker.Node{Name: node.Name, Zone: node.Labels[v1.LabelTopologyZone], Draining: draining(node), Labels: node.Labels}
	for _, kind := range []v1.NodeAddressType{v1.NodeInternalIP, v1.NodeExternalIP} {
		for _, a := range node.Status.Addresses {
			if addr, ok := changetracker.ParseAddr(a.Address); ok && a.Type == kind {
				n.Addresses = append(n.Addresses, addr)
			}
		}
	}
	for _, text := range podCIDRs(node) {
		if cidr, ok := changetracker.ParsePrefix(text); ok {
			n.PodCIDRs = append(n.PodCIDRs, cidr)
		}
	}
	return n
}

// taintToBeDeleted is the taint that the cluster autoscaler adds to a node before it
// deletes it.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// draining returns why load balancers should send a node no new connections (HC-30).
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

// podCIDRs prefers the field that holds both IP families.
func podCIDRs(node *v1.Node) []string {
	if len(node.Spec.PodCIDRs) > 0 {
		return node.Spec.PodCIDRs
	}
	return []string{node.Spec.PodCIDR}
}
