package main

import (
	"encoding/hex"
	"hash/fnv"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/net"
	"k8s.io/utils/ptr"
)

// manager is who manages our EndpointSlices, as their label says.
const manager = "readinessgate.serviceplane.io"

// hasGate reports whether a pod waits for a condition before it is ready.
func hasGate(p *v1.Pod, gate v1.PodConditionType) bool {
	return slices.Contains(p.Spec.ReadinessGates, v1.PodReadinessGate{ConditionType: gate})
}

func isTrue(p *v1.Pod, condition v1.PodConditionType) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == condition && c.Status == v1.ConditionTrue
	})
}

// canServe reports whether a pod would be ready without our gate.
func canServe(p *v1.Pod, gate v1.PodConditionType) bool {
	return p.DeletionTimestamp == nil && p.Status.Phase != v1.PodSucceeded && p.Status.Phase != v1.PodFailed && isTrue(p, v1.ContainersReady) &&
		!slices.ContainsFunc(p.Spec.ReadinessGates, func(g v1.PodReadinessGate) bool { return g.ConditionType != gate && !isTrue(p, g.ConditionType) })
}

// selects reports whether the nodes' proxy sends connections of a Service to a pod.
func selects(s *v1.Service, p *v1.Pod) bool {
	return len(s.Spec.Selector) > 0 && s.Spec.Type != v1.ServiceTypeExternalName && s.Spec.ClusterIP != v1.ClusterIPNone &&
		s.Labels["service.kubernetes.io/service-proxy-name"] == "" && labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(p.Labels))
}

// sliceOf returns the EndpointSlice that has a pod as ready endpoint of a Service, or nil if the pod
// has no address of the family or none of the ports. The slice goes with the pod.
func sliceOf(s *v1.Service, p *v1.Pod, family v1.IPFamily) *discovery.EndpointSlice {
	address, ports := addressOf(p, family), portsOf(s, p)
	if address == "" || len(ports) == 0 {
		return nil
	}
	id := fnv.New64a()
	_, _ = id.Write([]byte(string(p.UID) + "/" + string(family))) // it cannot fail
	return &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: s.Name + "-programmed-" + hex.EncodeToString(id.Sum(nil)),
			Labels:          map[string]string{discovery.LabelServiceName: s.Name, discovery.LabelManagedBy: manager},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: p.Name, UID: p.UID}},
		},
		AddressType: discovery.AddressType(family),
		Endpoints: []discovery.Endpoint{{
			Addresses:  []string{address},
			Conditions: discovery.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			TargetRef:  &v1.ObjectReference{Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID},
			NodeName:   new(p.Spec.NodeName),
		}},
		Ports: ports,
	}
}

// endpointsOf returns the addresses and ports of the only endpoint of a slice of ours.
func endpointsOf(s *discovery.EndpointSlice) (all []netip.AddrPort) {
	addr, err := netip.ParseAddr(s.Endpoints[0].Addresses[0])
	if err != nil {
		return nil // no proxy uses it
	}
	for _, p := range s.Ports {
		if e := netip.AddrPortFrom(addr, uint16(*p.Port)); !slices.Contains(all, e) {
			all = append(all, e)
		}
	}
	if len(all) > mostPorts {
		return []netip.AddrPort{netip.AddrPortFrom(addr, 0)}
	}
	return all
}

// mostPorts is of how many ports a node is asked for each; else it is asked for any.
const mostPorts = 16

func addressOf(p *v1.Pod, family v1.IPFamily) string {
	for _, ip := range p.Status.PodIPs {
		if net.IsIPv6String(ip.IP) == (family == v1.IPv6Protocol) {
			return ip.IP
		}
	}
	return ""
}

// portsOf returns the ports of a Service at a pod. A named target port that the pod does not have
// is left out.
func portsOf(s *v1.Service, p *v1.Pod) (ports []discovery.EndpointPort) {
	for i := range s.Spec.Ports {
		port := &s.Spec.Ports[i]
		number := port.TargetPort.IntVal
		switch name := port.TargetPort.StrVal; {
		case name != "":
			number = containerPort(p, name, port.Protocol)
		case number == 0:
			number = port.Port
		}
		if number != 0 {
			ports = append(ports, discovery.EndpointPort{Name: new(port.Name), Protocol: new(port.Protocol), Port: new(number), AppProtocol: port.AppProtocol})
		}
	}
	return ports
}

// containerPort returns the port of a container, or of a sidecar, by its name; 0 if there is none.
func containerPort(p *v1.Pod, name string, protocol v1.Protocol) int32 {
	sidecars := slices.DeleteFunc(slices.Clone(p.Spec.InitContainers), func(c v1.Container) bool {
		return ptr.Deref(c.RestartPolicy, "") != v1.ContainerRestartPolicyAlways
	})
	for _, c := range slices.Concat(p.Spec.Containers, sidecars) {
		for _, port := range c.Ports {
			if port.Name == name && port.Protocol == protocol {
				return port.ContainerPort
			}
		}
	}
	return 0
}

// hasReady reports whether a slice has the pod of one of ours as ready.
func hasReady(s, own *discovery.EndpointSlice) bool {
	return s.AddressType == own.AddressType && slices.ContainsFunc(s.Endpoints, func(e discovery.Endpoint) bool {
		return e.TargetRef != nil && e.TargetRef.UID == own.Endpoints[0].TargetRef.UID && ptr.Deref(e.Conditions.Ready, true)
	})
}
