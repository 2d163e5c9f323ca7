package main

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// pod is a pod of the cluster, as described by one endpoint.
type pod struct {
	namespace, name string
	addr            netip.Addr
	local           bool // on the proxy's node
}

// key is the same for the endpoints of a pod in both IP families.
func (p pod) key() string { return p.namespace + "/" + p.name }

// scalable returns the first Service with a VIP and several endpoints, and its slices.
func (o objects) scalable() (scaled objects, found bool) {
	for _, service := range o.Services {
		scaled = objects{Services: []*v1.Service{service}}
		for _, slice := range o.Slices {
			if slice.Namespace == service.Namespace && slice.Labels[discovery.LabelServiceName] == service.Name && len(slice.Endpoints) > 1 {
				scaled.Slices = append(scaled.Slices, slice)
			}
		}
		if service.Spec.ClusterIP != v1.ClusterIPNone && len(scaled.Slices) > 0 {
			return scaled, true
		}
	}
	return objects{}, false
}

// name returns the name of the first Service.
func (o objects) name() string { return o.Services[0].Namespace + "/" + o.Services[0].Name }

// grow adds a copy of the first pod to a slice, at the next free address.
func grow(slice *discovery.EndpointSlice) (*discovery.EndpointSlice, pod) {
	bigger := slice.DeepCopy()
	added := *bigger.Endpoints[0].DeepCopy()
	taken := map[netip.Addr]bool{}
	for i := range slice.Endpoints {
		taken[podOf(slice, i).addr] = true
	}
	addr := podOf(slice, 0).addr
	for taken[addr] {
		addr = addr.Next()
	}
	added.Addresses = []string{addr.String()}
	added.TargetRef = &v1.ObjectReference{Kind: "Pod", Name: slice.Labels[discovery.LabelServiceName] + "-new"}
	bigger.Endpoints = append(bigger.Endpoints, added)
	return bigger, podOf(bigger, len(bigger.Endpoints)-1)
}

// shrink removes the first pod from a slice.
func shrink(slice *discovery.EndpointSlice) (*discovery.EndpointSlice, pod) {
	smaller := slice.DeepCopy()
	smaller.Endpoints = slices.Delete(smaller.Endpoints, 0, 1)
	return smaller, podOf(slice, 0)
}

// podOf returns the pod of an endpoint, named by its targetRef or its address.
func podOf(slice *discovery.EndpointSlice, i int) pod {
	endpoint := slice.Endpoints[i]
	p := pod{namespace: slice.Namespace, local: endpoint.NodeName != nil && *endpoint.NodeName == nodeName}
	if len(endpoint.Addresses) > 0 {
		p.name = endpoint.Addresses[0]
		p.addr, _ = netip.ParseAddr(endpoint.Addresses[0])
	}
	if endpoint.TargetRef != nil {
		p.name = endpoint.TargetRef.Name
	}
	return p
}

// podPorts returns the ports of the pods of a slice.
func podPorts(slice *discovery.EndpointSlice) []uint16 {
	var ports []uint16
	for _, port := range slice.Ports {
		if port.Port != nil && !slices.Contains(ports, uint16(*port.Port)) {
			ports = append(ports, uint16(*port.Port))
		}
	}
	return ports
}
