package hostile

import (
	"fmt"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
)

// Limits of the API server. etcd takes objects of that size by default. The others are of the
// validation of Services and EndpointSlices.
const (
	maxObject      = 3 << 19
	maxAnnotations = 1 << 18
	maxEndpoints   = 1_000
	maxSlicePorts  = 20_000
	maxAddresses   = 100
	maxHints       = 8
)

const tenant = "tenant"

// objects are a tenant's.
type objects struct {
	name     string
	services []*v1.Service
	slices   []*discovery.EndpointSlice
}

// list returns the nth part of a number of values.
func list[T any](number, part int, value func(i int) T) []T {
	values := make([]T, 0, number/part)
	for i := range number / part {
		values = append(values, value(i))
	}
	return values
}

func address(first byte) func(i int) string {
	return func(i int) string {
		return netip.AddrFrom4([4]byte{first, byte(i >> 16), byte(i >> 8), byte(i)}).String()
	}
}

func service(ports int, options ...proxiertest.ServiceOption) *v1.Service {
	s := proxiertest.Service(tenant, "s", append([]proxiertest.ServiceOption{proxiertest.ClusterIPs("10.96.1.1")}, options...)...)
	for i := range ports {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Protocol: v1.ProtocolTCP, Port: int32(i + 1)})
	}
	return s
}

func externalIPs(ips []string) proxiertest.ServiceOption { return proxiertest.ExternalIPs(ips...) }

// balanced makes a Service of type LoadBalancer. The addresses need no node ports.
func balanced(ips, ranges []string) proxiertest.ServiceOption {
	return func(s *v1.Service) {
		s.Spec.Type, s.Spec.AllocateLoadBalancerNodePorts = v1.ServiceTypeLoadBalancer, new(false)
		s.Spec.LoadBalancerSourceRanges = ranges
		for _, ip := range ips {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: ip})
		}
	}
}

// slicesOf returns slices with so many endpoints and ports; edit sees each endpoint.
func slicesOf(number, endpoints, ports int, edit func(e *discovery.Endpoint)) (all []*discovery.EndpointSlice) {
	for n := range number {
		s := proxiertest.Slice(tenant, "s", discovery.AddressTypeIPv4)
		s.Name = fmt.Sprint("s-", n)
		for i := range ports {
			s.Ports = append(s.Ports, discovery.EndpointPort{Name: new(fmt.Sprint("p", i)), Protocol: new(v1.ProtocolTCP), Port: new(int32(i + 1))})
		}
		for i := range endpoints {
			e := discovery.Endpoint{Addresses: []string{address(11)(n<<10 + i)}, NodeName: new("there")}
			if edit != nil {
				edit(&e)
			}
			s.Endpoints = append(s.Endpoints, e)
		}
		all = append(all, s)
	}
	return all
}

// all returns the nth part of each object: with part 1, they are as large as the API server admits.
func all(part int) []objects {
	of := func(n int) int { return max(1, n/part) }
	strange := func(text string) string { return strings.Repeat(text, 300)[:253] }
	one := func(name string, s *v1.Service, slices []*discovery.EndpointSlice) objects {
		return objects{name, []*v1.Service{s}, slices}
	}
	few := slicesOf(1, of(100), 1, nil)
	return []objects{
		one("annotations", service(1, func(s *v1.Service) {
			s.Annotations = map[string]string{"serviceplane.io/balancing": strings.Repeat("x", maxAnnotations/part/2), "a": strings.Repeat("y", maxAnnotations/part/2)}
		}), few),
		one("labels", service(1, func(s *v1.Service) {
			s.Labels = map[string]string{}
			for i := range of(10_000) {
				s.Labels[fmt.Sprintf("%s/%063d", strange("a.")[:63]+"a", i)] = "x"
			}
		}), few),
		one("names", func() *v1.Service {
			s := service(0)
			for i := range of(10_000) {
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprintf("p%062d", i), Protocol: v1.ProtocolTCP, Port: int32(i + 1)})
			}
			return s
		}(), slicesOf(1, of(1_000), 1, func(e *discovery.Endpoint) { e.NodeName, e.Zone = new(strange("n")), new(strange("z")) })),
		one("source ranges", service(1, balanced([]string{"203.0.113.1"}, list(80_000, part, func(i int) string { return address(50)(i) + "/32" }))), few),
		one("source ranges that overlap", service(1, balanced([]string{"203.0.113.1"}, list(80_000, part, func(i int) string {
			return netip.PrefixFrom(netip.MustParseAddr(address(50)(i)), 9+i%24).String()
		}))), few),
		one("malformed source ranges", service(1, balanced([]string{"203.0.113.1"}, list(80_000, part, func(i int) string { return address(50)(i) + "/33" }))), few),
		one("ports, load balancer IPs and source ranges", service(of(500), balanced(list(500, part, address(60)), list(50_000, part, func(i int) string {
			return address(50)(2*i) + "/32"
		}))), few),
		one("load balancer IPs that admit each other", service(1, balanced(list(30_000, part, address(60)), []string{"192.0.2.0/24"})), few),
		one("ports and load balancer IPs that admit each other", service(of(500), balanced(list(500, part, address(60)), []string{"192.0.2.0/24"})), few),
		one("external IPs and endpoints", service(1, externalIPs(list(20_000, part, address(60)))), slicesOf(4, of(maxEndpoints), 1, nil)),
		one("ports, external IPs and endpoints", service(of(100), externalIPs(list(100, part, address(60)))), slicesOf(4, of(maxEndpoints), of(100), nil)),
		one("ports and endpoints", service(of(100)), slicesOf(3, of(maxEndpoints), of(100), nil)),
		one("most ports of a slice", service(of(10_000)), slicesOf(1, of(maxEndpoints), of(maxSlicePorts), nil)),
		one("ports of a slice without number", service(1), func() []*discovery.EndpointSlice {
			s := slicesOf(1, of(maxEndpoints), of(maxSlicePorts), nil)
			for i := range s[0].Ports {
				s[0].Ports[i].Port = nil
			}
			return s
		}()),
		one("addresses of endpoints", service(1), slicesOf(1, of(maxEndpoints), 1, func(e *discovery.Endpoint) {
			e.Addresses = append(e.Addresses, list(maxAddresses-1, 1, address(12))...)
		})),
		one("hints", service(1), slicesOf(1, of(maxEndpoints), 1, func(e *discovery.Endpoint) {
			e.Hints = &discovery.EndpointHints{}
			for i := range maxHints {
				e.Hints.ForZones = append(e.Hints.ForZones, discovery.ForZone{Name: fmt.Sprint(i, strange("z")[:60])})
				e.Hints.ForNodes = append(e.Hints.ForNodes, discovery.ForNode{Name: fmt.Sprint(i, strange("n")[:60])})
			}
		})),
		one("affinity", service(of(500), func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: new(int32(86_400))}}
		}), slicesOf(1, of(maxEndpoints), of(500), nil)),
		one("external IPs that are pods'", service(1, externalIPs(list(60_000, part, address(13)))), few),
		{"one's external IPs for two Services", []*v1.Service{
			service(of(20), externalIPs(list(300, part, address(60)))),
			service(of(20), externalIPs(list(300, part, address(60))), func(s *v1.Service) {
				s.Name, s.Spec.ClusterIP, s.Spec.ClusterIPs, s.CreationTimestamp = "second", "10.96.1.2", []string{"10.96.1.2"}, metav1.Now()
			}),
		}, few},
	}
}
