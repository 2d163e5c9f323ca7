package proxiertest

import (
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// ServiceOption changes a Service under construction.
type ServiceOption func(*v1.Service)

// Service builds a Service of type ClusterIP, with traffic policies Cluster and
// without ports and addresses, and then applies the options in their order.
func Service(namespace, name string, opts ...ServiceOption) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1.ServiceSpec{
			Type:                  v1.ServiceTypeClusterIP,
			InternalTrafficPolicy: ptr.To(v1.ServiceInternalTrafficPolicyCluster),
			SessionAffinity:       v1.ServiceAffinityNone,
		},
	}
	for _, opt := range opts {
		opt(s)
	}
	return s
}

// ClusterIPs sets the VIPs, at most one of each family, and with them the
// Service's families. Without an address it takes the VIPs away.
func ClusterIPs(addresses ...string) ServiceOption {
	return func(s *v1.Service) {
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies = "", addresses, nil
		for i, address := range addresses {
			if i == 0 {
				s.Spec.ClusterIP = address
			}
			family := v1.IPv4Protocol
			if strings.Contains(address, ":") {
				family = v1.IPv6Protocol
			}
			s.Spec.IPFamilies = append(s.Spec.IPFamilies, family)
		}
	}
}

// Headless makes the Service one that has no VIP but in DNS the addresses of its
// endpoints.
func Headless() ServiceOption {
	return func(s *v1.Service) {
		s.Spec.ClusterIP, s.Spec.ClusterIPs = v1.ClusterIPNone, []string{v1.ClusterIPNone}
	}
}

// ExternalName makes the Service an alias of a DNS name.
func ExternalName(name string) ServiceOption {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeExternalName
		s.Spec.ExternalName = name
		ClusterIPs()(s)
	}
}

// Port adds a port.
func Port(name string, protocol v1.Protocol, port int32) ServiceOption {
	return func(s *v1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: name, Protocol: protocol, Port: port})
	}
}

// NodePort adds a port that all nodes accept too, at nodePort, and makes the
// Service one of type NodePort unless it is a load balancer's already.
func NodePort(name string, protocol v1.Protocol, port, nodePort int32) ServiceOption {
	return func(s *v1.Service) {
		s.Spec.Ports = append(s.Spec.Ports,
			v1.ServicePort{Name: name, Protocol: protocol, Port: port, NodePort: nodePort})
		if s.Spec.Type == v1.ServiceTypeClusterIP {
			s.Spec.Type = v1.ServiceTypeNodePort
		}
	}
}

// ExternalIPs adds VIPs that somebody else routes to the node.
func ExternalIPs(addresses ...string) ServiceOption {
	return func(s *v1.Service) { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, addresses...) }
}

// LoadBalancer makes the Service one of type LoadBalancer whose load balancer has
// these addresses.
func LoadBalancer(addresses ...string) ServiceOption {
	return func(s *v1.Service) {
		for _, address := range addresses {
			Ingress(v1.LoadBalancerIngress{IP: address})(s)
		}
	}
}

// Ingress is LoadBalancer for a point that is more than an address.
func Ingress(ingress v1.LoadBalancerIngress) ServiceOption {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, ingress)
	}
}

// SourceRanges limits who may use the load balancer's addresses.
func SourceRanges(cidrs ...string) ServiceOption {
	return func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = cidrs }
}

// InternalPolicyLocal keeps traffic to the VIPs of ClusterIPs on the node.
func InternalPolicyLocal() ServiceOption {
	return func(s *v1.Service) { s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal) }
}

// ExternalPolicyLocal keeps traffic from outside on the node.
func ExternalPolicyLocal() ServiceOption {
	return func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal }
}

// ClientAffinity sends a client to the same endpoint until it has been quiet for
// the timeout, which is cut to seconds.
func ClientAffinity(timeout time.Duration) ServiceOption {
	return func(s *v1.Service) {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{
			ClientIP: &v1.ClientIPConfig{TimeoutSeconds: new(int32(timeout / time.Second))},
		}
	}
}

// Created says when the API server made the Service.
func Created(at time.Time) ServiceOption {
	return func(s *v1.Service) { s.CreationTimestamp = metav1.NewTime(at) }
}
