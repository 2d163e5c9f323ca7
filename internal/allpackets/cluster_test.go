package allpackets

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

const services = 50

func newMaker(seed uint64) *maker { return &maker{rand.New(rand.NewPCG(seed, 20))} }

// cluster makes everything.
func (m *maker) cluster() *oracle.Cluster {
	c := &oracle.Cluster{
		Services: map[string]*v1.Service{}, Slices: map[string]*discovery.EndpointSlice{},
		DetectsPods: m.IntN(4) > 0, MasqueradeAll: m.IntN(4) == 0, StrictSourceRanges: m.IntN(2) == 0, DenyNodeExternalIPs: m.IntN(4) == 0,
		Kinds:             []string{"ClusterIP", "LoadBalancer", "ExternalIP", "NodePort"},
		NodePortAddresses: parsed(netip.MustParsePrefix, pick(m, []string{"0.0.0.0/0", "::/0"}, []string{"192.0.2.0/28", "2001:db8::/124"})...),
		ServiceCIDRs:      parsed(netip.MustParsePrefix, "10.96.0.0/16", "fd00:96::/112"),
	}
	c.Node = m.node()
	for i := range services {
		name := fmt.Sprintf("s%d", i)
		c.Services[name] = m.service(name, i)
		for range m.IntN(3) {
			for _, family := range []discovery.AddressType{discovery.AddressTypeIPv4, discovery.AddressTypeIPv6} {
				slice := m.slice(name, family, len(c.Slices))
				c.Slices[slice.Name] = slice
			}
		}
	}
	return c
}

// change replaces and deletes some objects, and tells the proxy.
func (m *maker) change(c *oracle.Cluster, p proxier.EventHandler) {
	if m.IntN(2) == 0 {
		c.Node = m.node()
		p.OnNodeChange(c.Node)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Services)) {
		old := c.Services[name]
		switch m.IntN(8) {
		case 0:
			delete(c.Services, name)
			p.OnServiceDelete(old)
		case 1, 2:
			number, _ := strconv.Atoi(name[1:])
			c.Services[name] = m.service(name, number)
			p.OnServiceUpdate(old, c.Services[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Slices)) {
		old := c.Slices[name]
		switch m.IntN(8) {
		case 0:
			delete(c.Slices, name)
			p.OnEndpointSliceDelete(old)
		case 1, 2:
			service, number, _ := strings.Cut(name, "-")
			n, _ := strconv.Atoi(number)
			c.Slices[name] = m.slice(service, old.AddressType, n)
			p.OnEndpointSliceUpdate(old, c.Slices[name])
		}
	}
}

func (m *maker) node() changetracker.Node {
	return changetracker.Node{
		Name: pick(m, "here", "there"), Zone: pick(m, "x", ""), Labels: oracle.Pool(pick(m, "a", "b")), PodCIDRs: parsed(netip.MustParsePrefix, "10.244.1.0/24", "fd00:244:1::/48"),
		Addresses: pick(m,
			parsed(netip.MustParseAddr, "192.0.2.10", "192.0.2.20", "2001:db8::10", "2001:db8::20"),
			parsed(netip.MustParseAddr, "192.0.2.10", "2001:db8::10"),
			parsed(netip.MustParseAddr, "2001:db8::20", "192.0.2.20")),
	}
}

func parsed[T any](parse func(string) T, texts ...string) (all []T) {
	for _, text := range texts {
		all = append(all, parse(text))
	}
	return all
}

// maker makes objects by chance, with values from small pools: they shall meet.
type maker struct{ *rand.Rand }

func pick[T any](m *maker, from ...T) T { return from[m.IntN(len(from))] }

func (m *maker) some(from ...string) (some []string) {
	for _, item := range from {
		if m.IntN(4) == 0 {
			some = append(some, item)
		}
	}
	return some
}

func (m *maker) service(name string, i int) *v1.Service {
	ips := []string{fmt.Sprintf("10.96.0.%d", i+1), fmt.Sprintf("fd00:96::%x", i+1)}
	if m.IntN(8) == 0 {
		ips = pick(m, []string{"10.96.0.1", "fd00:96::1"}, []string{"192.0.2.20", "2001:db8::20"}, []string{"10.96.0.200"}, []string{"fd00:96::200"})
	}
	vips := m.some("192.0.2.10", "192.0.2.20", "203.0.113.1", "203.0.113.2", "198.51.100.7", "10.244.1.5",
		"2001:db8::10", "2001:db8::20", "2001:db8:1::1", "2001:db8:1::2", "fd00:244:1::5")
	s := proxiertest.Service("ns", name, proxiertest.ClusterIPs(ips...), proxiertest.Created(time.Unix(int64(1+m.IntN(20)), 0)))
	s.UID = types.UID("uid-" + name)
	for _, protocol := range pick(m, []v1.Protocol{v1.ProtocolTCP}, []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}, []v1.Protocol{v1.ProtocolUDP}, []v1.Protocol{v1.ProtocolSCTP}) {
		port := pick[int32](m, 80, 81, 443, 30080)
		if m.IntN(8) > 0 { // iptables divides more than 16 node ports of a protocol
			proxiertest.NodePort("http", protocol, port, 30080+m.Int32N(48))(s)
		} else {
			proxiertest.Port("http", protocol, port)(s)
		}
	}
	if m.IntN(2) == 0 {
		proxiertest.ExternalIPs(vips...)(s)
	} else {
		proxiertest.LoadBalancer(vips...)(s)
		proxiertest.SourceRanges(m.some("192.0.2.0/28", "192.0.2.0/24", "198.51.100.0/25", "10.244.2.0/24", "2001:db8::/124", "2001:db8:5::/64", "0.0.0.0/0")...)(s)
	}
	if m.IntN(4) == 0 {
		oracle.SetFailover(s, pick(m, 0, 50, 100), m.IntN(2) == 0)
	}
	if m.IntN(4) == 0 {
		oracle.SetDenied(s, m.some("192.0.2.8/29", "198.51.100.0/26", "10.244.2.0/25", "2001:db8::f/128", "2001:db8:5::/65")...)
	}
	if m.IntN(6) == 0 {
		oracle.SetExposeOn(s, pick(m, "a", "b"))
	}
	if i%3 == 1 { // without a draw, so that a seed has the same cluster with and without limits
		oracle.SetClientLimit(s, []string{"rate=20", "open=5,drop", "rate=3,open=100,ipv4=24"}[i/3%3])
	}
	mode := v1.LoadBalancerIPModeProxy
	switch m.IntN(24) {
	case 0:
		proxiertest.Headless()(s)
	case 1:
		s.Labels = map[string]string{changetracker.LabelServiceProxyName: "another"}
	case 2:
		proxiertest.Ingress(v1.LoadBalancerIngress{IP: "203.0.113.9", IPMode: &mode})(s)
	}
	for _, edit := range []proxiertest.ServiceOption{
		proxiertest.InternalPolicyLocal(), proxiertest.ExternalPolicyLocal(), proxiertest.ClientAffinity(time.Hour),
	} {
		if m.IntN(3) == 0 {
			edit(s)
		}
	}
	return s
}

func (m *maker) slice(service string, family discovery.AddressType, i int) *discovery.EndpointSlice {
	s := proxiertest.Slice("ns", service, family, proxiertest.SliceName(fmt.Sprintf("%s-%d", service, i)))
	for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP} {
		proxiertest.SlicePort("http", protocol, pick[int32](m, 8080, 8081))(s)
	}
	pods := []string{"10.244.1.5", "10.244.1.6", "10.244.2.6", "10.244.2.7", "10.244.3.8"}
	if family == discovery.AddressTypeIPv6 {
		pods = []string{"fd00:244:1::5", "fd00:244:1::6", "fd00:244:2::6", "fd00:244:2::7", "fd00:244:3::8"}
	}
	for _, address := range m.some(pods...) {
		proxiertest.Endpoint(address)(s)
		e := &s.Endpoints[len(s.Endpoints)-1]
		// An address has one node: the engines know it by address.
		e.NodeName = map[string]*string{
			"10.244.1.5": new("here"), "10.244.2.6": new("there"), "10.244.2.7": new("there"),
			"fd00:244:1::5": new("here"), "fd00:244:2::6": new("there"), "fd00:244:2::7": new("there"),
		}[address]
		if m.IntN(3) == 0 {
			condition := func() *bool { return pick(m, nil, new(true), new(false)) }
			e.Conditions = discovery.EndpointConditions{Ready: condition(), Serving: condition(), Terminating: condition()}
		}
		if m.IntN(4) == 0 {
			e.Hostname = pick(m, oracle.Group(1), oracle.Group(1), oracle.Group(2), oracle.Maintenance())
		}
		if m.IntN(3) == 0 {
			e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: pick(m, "x", "y")}}}
		}
	}
	return s
}
