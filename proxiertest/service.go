package proxiertest

import (
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// ServiceOption is an argument of Service.
type ServiceOption func(*v1.Service)

// Service returns a Service of type ClusterIP, with traffic policies Cluster and without
// ports and addresses, to which it applies the options in order.
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

// ClusterIPs sets the ClusterIPs, at most one of each family, and the IP families. Without
// an address it removes them.
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

// Headless makes the Service headless: its ClusterIP is None.
func Headless() ServiceOption {
	return func(s *v1.Service) {
		s.Spec.ClusterIP, s.Spec.ClusterIPs = v1.ClusterIPNone, []string{v1.ClusterIPNone}
	}
}

// ExternalName sets type ExternalName: the Service is an alias of a DNS name.
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

// NodePort adds a port with a node port, and sets type NodePort unless the type is
// LoadBalancer.
func NodePort(name string, protocol v1.Protocol, port, nodePort int32) ServiceOption {
	return func(s *v1.Service) {
		s.Spec.Ports = append(s.Spec.Ports,
			v1.ServicePort{Name: name, Protocol: protocol, Port: port, NodePort: nodePort})
		if s.Spec.Type == v1.ServiceTypeClusterIP {
			s.Spec.Type = v1.ServiceTypeNodePort
		}
	}
}

// ExternalIPs adds external IPs.
func ExternalIPs(addresses ...string) ServiceOption {
	return func(s *v1.Service) { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, addresses...) }
}

// LoadBalancer sets type LoadBalancer, and adds load balancer IPs to the status.
func LoadBalancer(addresses ...string) ServiceOption {
	return func(s *v1.Service) {
		for _, address := range addresses {
			Ingress(v1.LoadBalancerIngress{IP: address})(s)
		}
	}
}

// Ingress sets type LoadBalancer, and adds an ingress to the status, which has more fields
// than an IP.
func Ingress(ingress v1.LoadBalancerIngress) ServiceOption {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, ingress)
	}
}

// SourceRanges sets loadBalancerSourceRanges: the clients that may use the load balancer
// IPs.
func SourceRanges(cidrs ...string) ServiceOption {
	return func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = cidrs }
}

// InternalPolicyLocal sets internalTrafficPolicy Local: ClusterIPs use local endpoints.
func InternalPolicyLocal() ServiceOption {
	return func(s *v1.Service) { s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal) }
}

// ExternalPolicyLocal sets externalTrafficPolicy Local: external IPs, load balancer IPs
// and node ports use local endpoints.
func ExternalPolicyLocal() ServiceOption {
	return func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal }
}

// ClientAffinity sets session affinity ClientIP: a client gets the same endpoint until it
// makes no connection for the timeout, which is truncated to seconds.
func ClientAffinity(timeout time.Duration) ServiceOption {
	return func(s *v1.Service) {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{
			ClientIP: &v1.ClientIPConfig{TimeoutSeconds: new(int32(timeout / time.Second))},
		}
	}
}

// Created sets the creation timestamp.
func Created(at time.Time) ServiceOption {
	return func(s *v1.Service) { s.CreationTimestamp = metav1.NewTime(at) }
}
