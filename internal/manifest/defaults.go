package manifest

import (
	"cmp"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// setDefaults sets an API server's defaults in the fields that a proxy reads. It
// allocates no cluster IPs and no node ports.
func setDefaults(value Value) {
	switch o := value.(type) {
	case *v1.Service:
		defaultService(o)
	case *discovery.EndpointSlice:
		defaultSlice(o)
	}
}

func defaultService(s *v1.Service) {
	s.Namespace = cmp.Or(s.Namespace, metav1.NamespaceDefault)
	spec := &s.Spec
	spec.Type = cmp.Or(spec.Type, v1.ServiceTypeClusterIP)
	defaultClusterIPs(spec)
	for i := range spec.Ports {
		port := &spec.Ports[i]
		port.Protocol = cmp.Or(port.Protocol, v1.ProtocolTCP)
		if port.TargetPort == (intstr.IntOrString{}) {
			port.TargetPort = intstr.FromInt32(port.Port)
		}
	}
	defaultPolicies(spec)
}

func defaultClusterIPs(spec *v1.ServiceSpec) {
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	if len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = cmp.Or(spec.ClusterIP, spec.ClusterIPs[0])
	}
	if len(spec.IPFamilies) > 0 || spec.ClusterIP == v1.ClusterIPNone {
		return
	}
	for _, ip := range spec.ClusterIPs {
		family := v1.IPv4Protocol
		if strings.Contains(ip, ":") {
			family = v1.IPv6Protocol
		}
		spec.IPFamilies = append(spec.IPFamilies, family)
	}
}

func defaultPolicies(spec *v1.ServiceSpec) {
	spec.SessionAffinity = cmp.Or(spec.SessionAffinity, v1.ServiceAffinityNone)
	if spec.SessionAffinity == v1.ServiceAffinityClientIP {
		if spec.SessionAffinityConfig == nil {
			spec.SessionAffinityConfig = &v1.SessionAffinityConfig{}
		}
		if spec.SessionAffinityConfig.ClientIP == nil {
			spec.SessionAffinityConfig.ClientIP = &v1.ClientIPConfig{}
		}
		timeout := &spec.SessionAffinityConfig.ClientIP.TimeoutSeconds
		*timeout = cmp.Or(*timeout, new(v1.DefaultClientIPServiceAffinitySeconds))
	}
	if spec.Type == v1.ServiceTypeExternalName {
		return
	}
	spec.InternalTrafficPolicy = cmp.Or(spec.InternalTrafficPolicy, new(v1.ServiceInternalTrafficPolicyCluster))
	if spec.Type != v1.ServiceTypeClusterIP || len(spec.ExternalIPs) > 0 {
		spec.ExternalTrafficPolicy = cmp.Or(spec.ExternalTrafficPolicy, v1.ServiceExternalTrafficPolicyCluster)
	}
}

func defaultSlice(s *discovery.EndpointSlice) {
	s.Namespace = cmp.Or(s.Namespace, metav1.NamespaceDefault)
	for i := range s.Ports {
		port := &s.Ports[i]
		port.Name = cmp.Or(port.Name, new(""))
		port.Protocol = cmp.Or(port.Protocol, new(v1.ProtocolTCP))
	}
}
