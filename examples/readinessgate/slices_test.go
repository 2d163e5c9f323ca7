package main

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// The EndpointSlice of a pod has its addresses, and the ports of the Service at the pod.
func TestSliceOf(t *testing.T) {
	t.Parallel()
	p := &v1.Pod{}
	p.Namespace, p.Name, p.UID = "shop", "a", "1"
	p.Status.PodIPs = []v1.PodIP{{IP: "10.0.0.1"}}
	p.Spec.Containers = []v1.Container{{Ports: []v1.ContainerPort{{Name: "main", Protocol: v1.ProtocolUDP, ContainerPort: 1}, {Name: "main", Protocol: v1.ProtocolTCP, ContainerPort: 8080}}}}
	p.Spec.InitContainers = []v1.Container{
		{Ports: []v1.ContainerPort{{Name: "side", Protocol: v1.ProtocolTCP, ContainerPort: 2}}},
		{RestartPolicy: ptr.To(v1.ContainerRestartPolicyAlways), Ports: []v1.ContainerPort{{Name: "side", Protocol: v1.ProtocolTCP, ContainerPort: 9090}}},
	}
	s := &v1.Service{}
	s.Namespace, s.Name = "shop", "web"
	for name, target := range map[string]intstr.IntOrString{"number": intstr.FromInt32(81), "none": {}, "named": intstr.FromString("main"), "sidecar": intstr.FromString("side"), "missing": intstr.FromString("x")} {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: name, Protocol: v1.ProtocolTCP, Port: 80, TargetPort: target})
	}
	got := sliceOf(s, p, v1.IPv4Protocol)
	ports := map[string]int32{}
	for _, port := range got.Ports {
		ports[*port.Name] = *port.Port
	}
	if want := "map[named:8080 none:80 number:81 sidecar:9090]"; fmt.Sprint(ports) != want || got.Endpoints[0].Addresses[0] != "10.0.0.1" || !hasReady(got, got) {
		t.Errorf("ports are %v, want %v; the slice is %v", ports, want, got)
	}
	if got := sliceOf(s, p, v1.IPv6Protocol); got != nil {
		t.Errorf("a pod without an IPv6 address has %v, want nothing", got)
	}
	s.Spec.Ports = s.Spec.Ports[:0]
	if got := sliceOf(s, p, v1.IPv4Protocol); got != nil {
		t.Errorf("a Service without ports has %v, want nothing", got)
	}
}

// Which pods may be published, and for which Services.
func TestWhoIsPublished(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change         func(*v1.Pod, *v1.Service)
		serve, selects bool
	}{
		"usual":     {func(*v1.Pod, *v1.Service) {}, true, true},
		"failed":    {func(p *v1.Pod, _ *v1.Service) { p.Status.Phase = v1.PodFailed }, false, true},
		"not ready": {func(p *v1.Pod, _ *v1.Service) { p.Status.Conditions = nil }, false, true},
		"another gate": {func(p *v1.Pod, _ *v1.Service) {
			p.Spec.ReadinessGates = append(p.Spec.ReadinessGates, v1.PodReadinessGate{ConditionType: "other"})
		}, false, true},
		"another label":    {func(p *v1.Pod, _ *v1.Service) { p.Labels = nil }, true, false},
		"no selector":      {func(_ *v1.Pod, s *v1.Service) { s.Spec.Selector = nil }, true, false},
		"headless":         {func(_ *v1.Pod, s *v1.Service) { s.Spec.ClusterIP = v1.ClusterIPNone }, true, false},
		"an external name": {func(_ *v1.Pod, s *v1.Service) { s.Spec.Type = v1.ServiceTypeExternalName }, true, false},
		"another proxy": {func(_ *v1.Pod, s *v1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "x"}
		}, true, false},
	} {
		p, s := &v1.Pod{}, &v1.Service{}
		p.Labels, s.Spec.Selector = map[string]string{"app": "web"}, map[string]string{"app": "web"}
		p.Spec.ReadinessGates = []v1.PodReadinessGate{{ConditionType: "mine"}}
		p.Status.Conditions = []v1.PodCondition{{Type: v1.ContainersReady, Status: v1.ConditionTrue}}
		test.change(p, s)
		if serve, selected := canServe(p, "mine"), selects(s, p); serve != test.serve || selected != test.selects {
			t.Errorf("%s: can serve %v, selected %v; want %v and %v", name, serve, selected, test.serve, test.selects)
		}
	}
}
