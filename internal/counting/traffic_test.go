package counting

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/flows"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// trafficText prints "a=30(.1=20)": endpoint 10.0.0.1 of service a has 20 bytes of 30.
func (t *Traffic) text() string {
	var parts []string
	for _, p := range t.Counts().ServicePorts {
		var endpoints []string
		for _, e := range p.Endpoints {
			endpoints = append(endpoints, fmt.Sprintf(".%d=%d", e.Endpoint.Addr().As4()[3], e.Traffic.BytesOut))
		}
		parts = append(parts, fmt.Sprintf("%s=%d(%s)", p.Name.Name, p.Traffic.BytesOut, strings.Join(endpoints, " ")))
	}
	return strings.Join(parts, " ")
}

var vips = map[string]netip.Addr{"a": netip.MustParseAddr("10.96.0.1"), "b": netip.MustParseAddr("10.96.0.2")}

// served is a service with an address, a node port of the same number, and endpoints.
func served(service string, endpoints ...byte) *desired.Service {
	s := &desired.Service{Name: name(service), Protocol: desired.TCP, Frontends: []desired.Frontend{
		{Kind: desired.NodePort, Port: uint16(vips[service].As4()[3])}, {Kind: desired.ClusterIP, VIP: vips[service], Port: 80},
	}}
	for _, e := range endpoints {
		s.Cluster = s.Cluster.With(owner(service, e).Endpoint)
	}
	return s
}

// flow is one with a number, to an address and an endpoint, from which came some bytes.
func flow(number uint64, to netip.AddrPort, endpoint byte, size uint64) *Seen {
	return &Seen{
		Identity: number, Flow: flows.Flow{Protocol: desired.TCP, Dialled: to, Server: owner("", endpoint).Endpoint},
		Traffic: connection.Traffic{PacketsIn: 1, BytesIn: 1, BytesOut: size},
	}
}

// TestTraffic: no byte counts twice, in whatever order flows are listed and end.
func TestTraffic(t *testing.T) {
	l := NewTraffic()
	l.mostOfPort = 3
	node := netip.MustParseAddr("192.0.2.1")
	isNode := func(addr netip.Addr) bool { return addr == node }
	list := func(flows ...*Seen) {
		l.BeginListing()
		for _, f := range flows {
			l.Listed(f, isNode)
		}
		l.EndListing()
	}
	end := func(f *Seen) { l.Ended(f, isNode) }
	has := map[changetracker.ServicePortName]*desired.Service{}
	apply := func(services ...*desired.Service) {
		var outcomes []desired.Applied
		for _, s := range services {
			outcomes = append(outcomes, desired.Applied{Name: s.Name, Was: has[s.Name], Is: s})
			delete(has, s.Name)
		}
		for name, was := range has {
			outcomes = append(outcomes, desired.Applied{Name: name, Was: was})
		}
		clear(has)
		for _, s := range services {
			has[s.Name] = s
		}
		l.Applied(outcomes, func(*desired.Service) bool { return true })
	}
	a, b, nodePort := netip.AddrPortFrom(vips["a"], 80), netip.AddrPortFrom(vips["b"], 80), netip.AddrPortFrom(node, 1)
	for _, step := range []struct {
		does string
		do   func()
		want string
	}{
		{"what was there before does not count", func() { l.Begin(flow(1, a, 1, 1000)); apply(served("a", 1, 2), served("b", 1)) }, ""},
		{"then it counts", func() { list(flow(1, a, 1, 1001)) }, "a=1(.1=1)"},
		{"only the difference counts", func() { list(flow(1, a, 1, 1003)) }, "a=3(.1=3)"},
		{"twice in a listing", func() { list(flow(1, a, 1, 1003), flow(1, a, 1, 1004)) }, "a=4(.1=4)"},
		{"the rest at the end", func() { end(flow(1, a, 1, 1006)) }, "a=6(.1=6)"},
		{"a listing still has it", func() { list(flow(1, a, 1, 1005)) }, "a=6(.1=6)"},
		{"one that was never listed", func() { end(flow(2, b, 1, 5)) }, "a=6(.1=6) b=5(.1=5)"},
		{"at a node port", func() { end(flow(3, nodePort, 2, 1)) }, "a=7(.1=6 .2=1) b=5(.1=5)"},
		{"at the same port of others", func() { end(flow(4, netip.AddrPortFrom(vips["b"], 1), 2, 100)) }, "a=7(.1=6 .2=1) b=5(.1=5)"},
		{"not translated", func() { f := flow(5, a, 1, 100); f.Server = f.Dialled; end(f); list(f) }, "a=7(.1=6 .2=1) b=5(.1=5)"},
		{"its counters were set to 0", func() { list(flow(6, a, 1, 3)); list(flow(6, a, 1, 2)) }, "a=12(.1=11 .2=1) b=5(.1=5)"},
		{"its endpoint is gone", func() { apply(served("a", 2), served("b", 1)); list(flow(6, a, 1, 4)) }, "a=14(.2=1) b=5(.1=5)"},
		{"its endpoint returns", func() { apply(served("a", 1, 2), served("b", 1)); list(flow(6, a, 1, 5)) }, "a=15(.1=1 .2=1) b=5(.1=5)"},
		{"the service is gone, another has its address", func() {
			list(flow(7, b, 1, 2))
			other := served("a", 1, 2)
			other.Frontends = append(other.Frontends, served("b").Frontends...)
			apply(other)
			list(flow(6, a, 1, 5), flow(7, b, 1, 9))
		}, "a=15(.1=1 .2=1)"},
		{"of that one the next flow counts", func() { list(flow(6, a, 1, 5), flow(7, b, 1, 9), flow(8, b, 1, 2)) }, "a=17(.1=3 .2=1)"},
		{"too many open flows count at their end", func() {
			list(flow(6, a, 1, 5), flow(8, b, 1, 2), flow(9, a, 1, 1), flow(10, a, 1, 100))
			end(flow(10, a, 1, 100))
		}, "a=118(.1=104 .2=1)"},
		{"an end that nobody told leaves room", func() { list(); list(flow(9, a, 1, 1)); list(flow(9, a, 1, 1), flow(11, a, 1, 1)) }, "a=119(.1=105 .2=1)"},
		{"an engine counts by itself", func() {
			l.Applied([]desired.Applied{{Name: name("a"), Is: served("a", 1)}}, func(*desired.Service) bool { return false })
			end(flow(9, a, 1, 9))
		}, ""},
	} {
		if step.do(); l.text() != step.want {
			t.Errorf("%s: %s, want %s", step.does, l.text(), step.want)
		}
	}
	if len(l.open) != 1 { // flow 11 of the service that is gone
		t.Errorf("%d open flows, want 1: %v", len(l.open), l.open)
	}
	l.Begun(time.Unix(1, 0))
	l.Begun(time.Unix(2, 0))
	if c := l.Counts(); !c.Since.Equal(time.Unix(1, 0)) || !c.Traffic {
		t.Errorf("since %v, traffic %v, want the first begin", c.Since, c.Traffic)
	}
	apply(served("a", 1))
	for n := range uint64(3 * mostEnded) { // what has ended is forgotten
		end(flow(100+n, a, 1, 1))
	}
	if got := len(l.ended) + len(l.endedBefore); got > 2*mostEnded {
		t.Errorf("%d ended flows are remembered, want at most %d", got, 2*mostEnded)
	}
}
