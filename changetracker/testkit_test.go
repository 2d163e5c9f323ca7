package changetracker

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errTest = errors.New("the kernel said no")

// web is the Service that most tests are about.
var web = types.NamespacedName{Namespace: "default", Name: "web"}

func portName(port string, protocol v1.Protocol) ServicePortName {
	return ServicePortName{NamespacedName: web, Port: port, Protocol: protocol}
}

func mustTracker(tb testing.TB, edits ...func(*Options)) *Tracker {
	tb.Helper()
	o := Options{Node: Node{Name: "here", Zone: "zone-a"}}
	for _, edit := range edits {
		edit(&o)
	}
	tracker, err := New(o)
	if err != nil {
		tb.Fatal(err)
	}
	return tracker
}

// mustEndpointTracker is a tracker without Services, to which every port matters, like
// an EndpointChangeTracker on its own.
func mustEndpointTracker(tb testing.TB, edits ...func(*Options)) *Tracker {
	tb.Helper()
	tracker := mustTracker(tb, edits...)
	tracker.store.endpointsOnly = true
	return tracker
}

// webService is a dual-stack Service with one TCP port, http 80.
func webService(edits ...func(*v1.Service)) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: web.Namespace, Name: web.Name},
		Spec: v1.ServiceSpec{
			Type:       v1.ServiceTypeClusterIP,
			ClusterIP:  "10.96.0.10",
			ClusterIPs: []string{"10.96.0.10", "fd00::10"},
			IPFamilies: []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
			Ports:      []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}},
		},
	}
	for _, edit := range edits {
		edit(s)
	}
	return s
}

// webSlice is an IPv4 slice of web with the port http 8080.
func webSlice(name string, endpoints ...discovery.Endpoint) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: web.Namespace, Name: name, Labels: map[string]string{discovery.LabelServiceName: web.Name},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{endpointPort("http", v1.ProtocolTCP, 8080)},
		Endpoints:   endpoints,
	}
}

func endpointPort(name string, protocol v1.Protocol, port int32) discovery.EndpointPort {
	return discovery.EndpointPort{Name: &name, Protocol: &protocol, Port: &port}
}

func at(address string, edits ...func(*discovery.Endpoint)) discovery.Endpoint {
	e := discovery.Endpoint{Addresses: []string{address}}
	for _, edit := range edits {
		edit(&e)
	}
	return e
}

func conditions(ready, serving, terminating bool) func(*discovery.Endpoint) {
	return func(e *discovery.Endpoint) {
		e.Conditions = discovery.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}
	}
}

func onNode(name string) func(*discovery.Endpoint) {
	return func(e *discovery.Endpoint) { e.NodeName = &name }
}

func created(s *discovery.EndpointSlice, seconds int64) *discovery.EndpointSlice {
	s.CreationTimestamp = metav1.Unix(seconds, 0)
	return s
}

func addrPort(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

// applyAll applies one family with success.
func applyAll(tb testing.TB, tracker *Tracker, family v1.IPFamily) (state *State, delta Delta) {
	tb.Helper()
	err := tracker.Apply(family, func(d Delta) ([]ServicePortName, error) {
		state, delta = d.After, d
		return nil, nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return state, delta
}

// peek returns what an Apply would receive, and consumes nothing.
func peek(tb testing.TB, tracker *Tracker, family v1.IPFamily) (state *State, delta Delta) {
	tb.Helper()
	err := tracker.Apply(family, func(d Delta) ([]ServicePortName, error) {
		state, delta = d.After, d
		return nil, errTest
	})
	if !errors.Is(err, errTest) {
		tb.Fatal(err)
	}
	return state, delta
}

func mustService(tb testing.TB, s *State, name ServicePortName) *ServicePort {
	tb.Helper()
	p, ok := s.Service(name)
	if !ok {
		tb.Fatalf("%v is not proxied; the state is\n%s", name, dump(s))
	}
	return p
}

// dump renders everything in a State, also endpoints of unknown Services.
func dump(s *State) string {
	var lines []string
	for _, service := range s.services.All() {
		for _, p := range service.ports {
			line := fmt.Sprintf("%s/%s %s", p.name, p.name.Protocol, dumpPort(p.port))
			for _, e := range p.endpoints.Slice() {
				line += "\n    " + dumpEndpoint(e)
			}
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

func dumpPort(p *ServicePort) string {
	if p == nil {
		return "-"
	}
	return fmt.Sprintf("%v np=%d hc=%d ext=%v vip=%v src=%v deny=%v aff=%v int=%v extl=%v %v", p, p.NodePort,
		p.HealthCheckNodePort, p.ExternalIPs, p.LoadBalancerVIPs, p.LoadBalancerSourceRanges, p.DenyAllSources,
		p.SessionAffinity, p.InternalPolicyLocal, p.ExternalPolicyLocal, p.Ext)
}

func dumpEndpoint(e Endpoint) string {
	return fmt.Sprintf("%v r=%v s=%v t=%v w=%d %s %s %v %v %v", e.Addr, e.Ready, e.Serving, e.Terminating, e.Weight,
		e.Zone, e.Node, e.ZoneHints, e.NodeHints, e.Ext)
}

// addrs are the addresses of endpoints, as text.
func addrs(list []Endpoint) []string {
	var texts []string
	for _, e := range list {
		texts = append(texts, e.String())
	}
	return texts
}

// outline renders a Delta: "name before>after +added -removed".
func outline(d Delta) []string {
	var lines []string
	for _, c := range d.Changes {
		before, after := "-", "-"
		if c.Before != nil {
			before = c.Before.String()
		}
		if c.After != nil {
			after = c.After.String()
		}
		line := fmt.Sprintf("%s %s>%s", c.Name, before, after)
		for _, e := range c.Removed {
			line += " -" + e.String()
		}
		for _, e := range c.Added {
			line += " +" + e.String()
		}
		lines = append(lines, line)
	}
	return lines
}

func wantOutline(tb testing.TB, d Delta, want ...string) {
	tb.Helper()
	if got := outline(d); !slices.Equal(got, want) {
		tb.Errorf("changes:\n got %s\nwant %s", strings.Join(got, "\n     "), strings.Join(want, "\n     "))
	}
}

// clock is a clock that is set by hand.
type clock struct{ time time.Time }

func newClock() *clock { return &clock{time: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)} }

func (c *clock) now() time.Time { return c.time }

func (c *clock) tick() time.Time {
	c.time = c.time.Add(time.Second)
	return c.time
}

func (c *clock) option(o *Options) { o.Now = c.now }

func inZone(name string) func(*discovery.Endpoint) {
	return func(e *discovery.Endpoint) { e.Zone = &name }
}
