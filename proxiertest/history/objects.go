package history

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// Objects is what the API server holds.
type Objects struct {
	Services map[string]*v1.Service
	Slices   map[string]*discovery.EndpointSlice
	Node     changetracker.Node
}

// namespace and serviceNames are those of all Services.
const namespace = "ns"

var serviceNames = []string{"a", "b", "c", "d", "e"} // read-only

// ServiceCIDRs are the ranges of all ClusterIPs.
func serviceCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/64")}
}

// dice makes the decisions of a history.
type dice struct{ *rand.Rand }

func oneOf[T any](d dice, from ...T) T { return from[d.IntN(len(from))] }

func someOf[T any](d dice, from ...T) (some []T) {
	for _, item := range from {
		if d.IntN(2) == 0 {
			some = append(some, item)
		}
	}
	return some
}

// pick returns a random ready-made ClusterIP. Few are free, so that Services take each
// other's.
func (d dice) clusterIPs() []string {
	n := 1 + d.IntN(len(serviceNames)+1)
	v4, v6 := fmt.Sprintf("10.96.0.%d", n), fmt.Sprintf("fd00:96::%x", n)
	return oneOf(d, []string{v4}, []string{v4, v6}, []string{v4, v6}, []string{v6})
}

func (d dice) protocols() []v1.Protocol {
	return oneOf(d, []v1.Protocol{v1.ProtocolTCP}, []v1.Protocol{v1.ProtocolUDP}, []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP})
}

// service returns a Service. VIPs and node ports are few, so that several Services claim
// the same.
func (d dice) service() *v1.Service {
	s := proxiertest.Service(namespace, oneOf(d, serviceNames...), proxiertest.ClusterIPs(d.clusterIPs()...))
	for _, protocol := range d.protocols() {
		if nodePort := oneOf[int32](d, 0, 30080, 30081); nodePort == 0 {
			proxiertest.Port("http", protocol, oneOf[int32](d, 80, 81))(s)
		} else {
			proxiertest.NodePort("http", protocol, oneOf[int32](d, 80, 81), nodePort)(s)
		}
	}
	vips := []string{"203.0.113.1", "203.0.113.2", "2001:db8:1::1"}
	if d.IntN(4) == 0 {
		proxiertest.ExternalIPs(someOf(d, vips...)...)(s)
	}
	if d.IntN(3) == 0 {
		d.loadBalancer(s, vips)
	}
	edits := []proxiertest.ServiceOption{
		proxiertest.InternalPolicyLocal(), proxiertest.ExternalPolicyLocal(), proxiertest.ClientAffinity(oneOf(d, time.Minute, time.Hour)),
		proxiertest.Created(time.Unix(int64(1+d.IntN(3)), 0)),
	}
	for _, edit := range edits {
		if d.IntN(4) == 0 {
			edit(s)
		}
	}
	switch d.IntN(20) {
	case 0:
		proxiertest.Headless()(s)
	case 1:
		s.Labels = map[string]string{changetracker.LabelServiceProxyName: "another"}
	}
	return s
}

func (d dice) loadBalancer(s *v1.Service, vips []string) {
	proxiertest.LoadBalancer(someOf(d, vips...)...)(s)
	if d.IntN(2) == 0 {
		proxiertest.SourceRanges(someOf(d, "192.0.2.0/28", "192.0.2.0/24", "198.51.100.7/32", "2001:db8::/32")...)(s)
	}
	if d.IntN(2) == 0 {
		proxiertest.ExternalPolicyLocal()(s)
		// The API server gives no port to two Services.
		s.Spec.HealthCheckNodePort = 32000 + 2*int32(slices.Index(serviceNames, s.Name)) + d.Int32N(2)
	}
}

func (d dice) slice() *discovery.EndpointSlice {
	service := oneOf(d, serviceNames...)
	family, suffix, format := discovery.AddressTypeIPv4, oneOf(d, "1", "2"), "10.244.%d.%d"
	if d.IntN(3) == 0 {
		family, suffix, format = discovery.AddressTypeIPv6, "6", "fd00:244:%d::%x"
	}
	s := proxiertest.Slice(namespace, service, family, proxiertest.SliceName(service+"-"+suffix))
	for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
		proxiertest.SlicePort("http", protocol, oneOf[int32](d, 8080, 8080, 8081))(s)
	}
	for range oneOf(d, 0, 1, 1, 2, 3, 5, 12) {
		node := oneOf(d, "here", "there")
		options := []proxiertest.EndpointOption{proxiertest.OnNode(node)}
		switch d.IntN(8) {
		case 0:
			options = append(options, proxiertest.Terminating())
		case 1:
			options = append(options, proxiertest.NotServing())
		case 2:
			options = append(options, func(e *discovery.Endpoint) { e.Hostname = oneOf(d, oracle.Group(1), oracle.Maintenance()) })
		}
		subnet := map[string]int{"here": 1, "there": 2}[node]
		proxiertest.Endpoint(fmt.Sprintf(format, subnet, 1+d.IntN(30)), options...)(s)
	}
	return s
}

func (d dice) node() changetracker.Node {
	node := changetracker.Node{Name: oneOf(d, "here", "here", "there"), Zone: oneOf(d, "x", "y")}
	for _, text := range someOf(d, "192.0.2.10", "2001:db8::10", "203.0.113.1") {
		node.Addresses = append(node.Addresses, netip.MustParseAddr(text))
	}
	return node
}
