package desired

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

var nodeIP = netip.MustParseAddr("192.0.2.10")

// explainerOfWeb has the Services web, with all kinds of frontends, and other, whose node port is
// the port of web.
func explainerOfWeb(t *testing.T, change func(*changetracker.ServicePort), endpoints ...changetracker.Endpoint) *explainer {
	t.Helper()
	web := changetracker.ServicePort{
		Name: webName, ClusterIP: clusterIP, Port: 30080, NodePort: 30443,
		ExternalIPs: []netip.Addr{nodeIP}, LoadBalancerVIPs: []netip.Addr{vip},
	}
	if change != nil {
		change(&web)
	}
	other := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "a", Name: "other"}, Protocol: v1.ProtocolTCP}
	return explainerOf(t, []changetracker.ServicePort{web, {Name: other, ClusterIP: clusterIP.Next(), Port: 1, NodePort: 30080}}, endpoints...)
}

// explainerOf has service ports, each of its own Service, that all have the same endpoints.
func explainerOf(tb testing.TB, ports []changetracker.ServicePort, endpoints ...changetracker.Endpoint) *explainer {
	tb.Helper()
	node := changetracker.Node{Name: "here", Zone: "a"}
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: node})
	if err != nil {
		tb.Fatal(err)
	}
	for _, p := range ports {
		if _, err := tracker.Services.Set(p.Name.NamespacedName, p); err != nil {
			tb.Fatal(err)
		}
		if _, err := tracker.Endpoints.Set(p.Name, endpoints...); err != nil {
			tb.Fatal(err)
		}
	}
	x := &explainer{
		Resolver:      Resolver{Node: node, DetectsPods: true},
		NodeAddresses: []netip.Addr{nodeIP},
		Globals: Globals{
			ServiceCIDRs:      []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")},
			NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")},
			PodInterface:      "veth*",
		},
	}
	if err := tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		x.State = delta.After
		return nil, nil
	}); err != nil {
		tb.Fatal(err)
	}
	return x
}

func packetTo(text string) Packet {
	return Packet{
		Protocol: TCP, Source: netip.MustParseAddr("198.51.100.7"), Destination: netip.MustParseAddrPort(text), Origin: FromOutside,
	}
}

// Resolve and Explain decide for the Resolver's Node, whatever the tracker's node is.
func TestResolveAndExplainForAnyNode(t *testing.T) {
	x := explainerOfWeb(t, func(p *changetracker.ServicePort) { p.InternalPolicyLocal = true }, inZone(local(1), "a"), inZone(remote(2), "b"), inZone(remote(3), "a"))
	for _, c := range []struct {
		node changetracker.Node
		want string
	}{
		{changetracker.Node{Name: "here"}, "forward, cluster 1,2,3, local 1, explained 1"},
		{changetracker.Node{Name: "there", Zone: "a"}, "forward, cluster 1,3, local 2,3, explained 2,3"},
		{changetracker.Node{Name: "there", Zone: "b"}, "forward, cluster 2, local 2,3, explained 2,3"},
		{changetracker.Node{Name: "nowhere", Zone: "c"}, "drop, cluster 1,2,3, local , explained "},
		{changetracker.Node{Zone: "a"}, "drop, cluster 1,3, local , explained "},
	} {
		x.Resolver.Node = c.node
		s, _ := x.Resolver.Resolve(x.State, webName)
		e, err := x.explain(packetTo(clusterIP.String() + ":30080"))
		if err != nil {
			t.Fatal(err)
		}
		var explained []netip.AddrPort
		for _, p := range e.Endpoints {
			if p.Local != (p.Excluded == "") {
				t.Errorf("%+v: %v: local %v, excluded %q", c.node, p.Addr, p.Local, p.Excluded)
			}
			if p.Excluded == "" {
				explained = append(explained, p.Addr)
			}
		}
		got := fmt.Sprintf("%v, cluster %s, local %s, explained %s", e.Verdict, numbers(s.Cluster.Slice()), numbers(s.Local.Slice()), numbers(explained))
		if got != c.want {
			t.Errorf("%+v: %s, want %s", c.node, got, c.want)
		}
	}
}

// The cases that real packets cannot show or seldom reach. proxiertest.Explanations compares
// the others with real packets.
func TestWhatIsExplained(t *testing.T) {
	policyLocal := func(p *changetracker.ServicePort) { p.ExternalPolicyLocal = true }
	here, there := local(1), remote(2)
	for rule, c := range map[string]struct {
		change    func(*changetracker.ServicePort)
		endpoints []changetracker.Endpoint
		packet    Packet
		verdict   Verdict
		service   string
		reason    string
	}{
		"an address wins over a node port": {
			endpoints: []changetracker.Endpoint{there}, packet: packetTo("192.0.2.10:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "192.0.2.10:30080/TCP is the ExternalIP of test/web:http",
		},
		"a node port": {
			endpoints: []changetracker.Endpoint{there}, packet: packetTo("192.0.2.10:30443"),
			verdict: VerdictForward, service: "test/web:http", reason: "node port 30443/TCP is the NodePort",
		},
		"a node port at an address of another machine": {
			packet: packetTo("192.0.2.11:30443"), verdict: VerdictPass, reason: "192.0.2.11 is not an address of this node",
		},
		"a node port on loopback": {
			packet: packetTo("127.0.0.1:30443"), verdict: VerdictPass, reason: "127.0.0.1 is a loopback address",
		},
		"an unallocated cluster IP": {
			packet: packetTo("10.96.7.7:80"), verdict: VerdictDrop, reason: "in a range of cluster IPs",
		},
		"another port of a cluster IP": {
			packet: packetTo("10.96.0.10:81"), verdict: VerdictReject, reason: "has no port 81/TCP",
		},
		"a pod by its interface": {
			change: policyLocal, endpoints: []changetracker.Endpoint{here, there},
			packet:  from(packetTo("203.0.113.1:30080"), FromOutside, "veth12"),
			verdict: VerdictForward, service: "test/web:http", reason: "does not bind pods",
		},
		"a pod whose interface is unknown": {
			change: policyLocal, endpoints: []changetracker.Endpoint{there},
			packet:  from(packetTo("203.0.113.1:30080"), FromPod, ""),
			verdict: VerdictForward, service: "test/web:http", reason: "does not bind pods",
		},
		"another interface": {
			change: policyLocal, endpoints: []changetracker.Endpoint{there},
			packet:  from(packetTo("203.0.113.1:30080"), FromPod, "eth0"),
			verdict: VerdictDrop, service: "test/web:http", reason: "none on this node",
		},
		"the node, from an unknown address": {
			change: policyLocal, endpoints: []changetracker.Endpoint{there},
			packet:  from(packetTo("203.0.113.1:30080"), FromNode, ""),
			verdict: VerdictForward, service: "test/web:http", reason: "does not bind the node itself",
		},
		"hints that are not used": {
			endpoints: []changetracker.Endpoint{inZone(local(1), "a"), there}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "hints for zones do not count: 10.244.0.2:8080 has none",
		},
		"hints that are used": {
			endpoints: []changetracker.Endpoint{inZone(local(1), "a"), inZone(there, "b")}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "1 of 2 endpoints may be chosen",
		},
		"only terminating endpoints": {
			endpoints: []changetracker.Endpoint{terminating(there)}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "no endpoint is ready",
		},
		"the first group": {
			endpoints: []changetracker.Endpoint{here, standby(there)}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "group 0 of several serves, with 1 of 1 endpoints ready: one ready endpoint is enough",
		},
		"the next group": {
			endpoints: []changetracker.Endpoint{terminating(here), standby(there)}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "group 1 serves, with 1 of 1 endpoints ready; group 0 has 0 of 0: one ready endpoint is enough",
		},
		"a share of a group": {
			change:    func(p *changetracker.ServicePort) { p.Failover.Share = 60 },
			endpoints: []changetracker.Endpoint{here, standby(there)}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "60 % of its endpoints are enough",
		},
		"a denied source": {
			change: func(p *changetracker.ServicePort) {
				p.DeniedSources = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("128.0.0.0/1")}
			},
			endpoints: []changetracker.Endpoint{there}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictDrop, service: "test/web:http", reason: "is in the denied ranges [0.0.0.0/1 128.0.0.0/1]",
		},
		"an address that other nodes have": {
			change: exposedElsewhere, endpoints: []changetracker.Endpoint{there}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictPass, reason: `test/web:http has 203.0.113.1:30080/TCP on nodes with "pool=edge"`,
		},
		"a node port that other nodes have": {
			change: exposedElsewhere, endpoints: []changetracker.Endpoint{there}, packet: packetTo("192.0.2.10:30443"),
			verdict: VerdictPass, reason: `test/web:http has 192.0.2.10:30443/TCP on nodes with "pool=edge"`,
		},
		"no endpoints": {packet: packetTo("203.0.113.1:30080"), verdict: VerdictReject, service: "test/web:http", reason: "no endpoint on any node"},
		"weights": {
			endpoints: []changetracker.Endpoint{weighted(here, 2), there}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "load balancing policy random, in proportion to the weights",
		},
		"a policy": {
			change: balancing(changetracker.SourceHash), endpoints: []changetracker.Endpoint{there}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "load balancing policy source-hash",
		},
		"a policy of other engines": {
			change: balancing(changetracker.LeastConnections), endpoints: []changetracker.Endpoint{weighted(here, 2), there}, packet: packetTo("203.0.113.1:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "this engine does not have it, and chooses an endpoint at random, in proportion to the weights",
		},
		"an IPv4-mapped IPv6 address": {
			endpoints: []changetracker.Endpoint{there}, packet: packetTo("[::ffff:203.0.113.1]:30080"),
			verdict: VerdictForward, service: "test/web:http", reason: "LoadBalancer",
		},
	} {
		t.Run(rule, func(t *testing.T) {
			got, err := explainerOfWeb(t, c.change, c.endpoints...).explain(c.packet)
			if err != nil {
				t.Fatalf("Explain = %v, want nil", err)
			}
			service := ""
			if got.Service != nil {
				service = got.Service.String()
			}
			if got.Verdict != c.verdict || service != c.service || !strings.Contains(strings.Join(got.Reasons, "; "), c.reason) {
				t.Errorf("verdict %v, service %q, reasons %q, want %v, %q and %q", got.Verdict, service, got.Reasons, c.verdict, c.service, c.reason)
			}
		})
	}
}

func standby(e changetracker.Endpoint) changetracker.Endpoint {
	e.Priority = 1
	return e
}

func weighted(e changetracker.Endpoint, weight uint16) changetracker.Endpoint {
	e.Weight = weight
	return e
}

func balancing(b changetracker.Balancing) func(*changetracker.ServicePort) {
	return func(p *changetracker.ServicePort) { p.Balancing = b }
}

func TestLeastConnectionsByWeights(t *testing.T) {
	x := explainerOfWeb(t, balancing(changetracker.LeastConnections), weighted(local(1), 2), local(2))
	x.Traits = func(*Service) Traits { return Traits{LeastByWeights: true} }
	e, err := x.explain(packetTo(clusterIP.String() + ":30080"))
	if want := "load balancing policy least-connections: at random, by the weights that package leastconnections gives"; err != nil || !slices.Contains(e.Reasons, want) || e.Balancing != changetracker.Random {
		t.Errorf("%+v, %v; want the reason %q", e, err, want)
	}
}

// Each policy, with engines that have it or not; Random is what remains.
func TestTraitsDecideThePolicy(t *testing.T) {
	for _, c := range []struct {
		traits Traits
		want   string
	}{
		{Traits{}, "random source-hash source-port-hash random"},
		{Traits{NoHash: true}, "random random random random"},
		{Traits{LeastByWeights: true}, "random source-hash source-port-hash random"},
		{Traits{LeastConnections: true}, "random source-hash source-port-hash least-connections"},
	} {
		var got []string
		for b := changetracker.Random; b <= changetracker.LeastConnections; b++ {
			got = append(got, c.traits.Balancing(&Service{Port: &changetracker.ServicePort{Balancing: b}}).String())
		}
		if text := strings.Join(got, " "); text != c.want {
			t.Errorf("%+v: %s, want %s", c.traits, text, c.want)
		}
	}
}

// Direct return keeps the source, unless the packet goes to a node port or an endpoint reaches itself.
func TestDirectReturnKeepsTheSource(t *testing.T) {
	x := explainerOfWeb(t, nil, local(1))
	x.Traits = func(*Service) Traits { return Traits{DirectReturn: true} }
	itself := packetTo(clusterIP.String() + ":30080")
	itself.Source, itself.Origin = local(1).Addr.Addr(), FromPod
	for text, c := range map[string]struct {
		packet Packet
		masqed bool
	}{
		"external IP": {packetTo("192.0.2.10:30080"), false},
		"itself":      {itself, false},
		"node port":   {packetTo("192.0.2.10:30443"), true},
	} {
		e, err := x.explain(c.packet)
		if err != nil || e.Verdict != VerdictForward || e.Masquerade != c.masqed || e.Endpoints[0].Masquerade != c.masqed {
			t.Errorf("%s: %v, masquerade %v, %v (%q), want %v", text, e.Verdict, e.Masquerade, err, e.Reasons, c.masqed)
		}
	}
}

func from(p Packet, origin Origin, link string) Packet {
	p.Origin, p.Interface = origin, link
	return p
}

func TestPacketsThatCannotBeExplained(t *testing.T) {
	x := explainerOfWeb(t, nil)
	good := packetTo("10.96.0.10:80")
	for fault, change := range map[string]func(*Packet){
		"protocol":    func(p *Packet) { p.Protocol = 1 },
		"source":      func(p *Packet) { p.Source = netip.Addr{} },
		"destination": func(p *Packet) { p.Destination = netip.AddrPortFrom(clusterIP, 0) },
		"families":    func(p *Packet) { p.Source = netip.MustParseAddr("2001:db8::1") },
		"origin":      func(p *Packet) { p.Origin = 0 },
	} {
		bad := good
		change(&bad)
		if _, err := x.explain(bad); !errors.Is(err, ErrPacket) || !strings.Contains(err.Error(), fault) {
			t.Errorf("Explain(%+v) = %v, want %v that names the %s", bad, err, ErrPacket, fault)
		}
	}
}

func TestExplanationsAreReadAsJSON(t *testing.T) {
	got, err := explainerOfWeb(t, nil, local(1)).explain(packetTo("203.0.113.1:30080"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"verdict":"forward"`, `"protocol":"TCP"`, `"origin":"outside"`, `"Kind":"LoadBalancer"`, `"scope":"Cluster"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s, want %s in it", text, want)
		}
	}
	var packet Packet
	if err := json.Unmarshal([]byte(`{"protocol":"UDP","source":"192.0.2.1","destination":"192.0.2.2:53","origin":"pod"}`), &packet); err != nil {
		t.Errorf("Unmarshal = %v, want nil", err)
	}
	if want := (Packet{
		Protocol: UDP, Source: netip.MustParseAddr("192.0.2.1"), Destination: netip.MustParseAddrPort("192.0.2.2:53"), Origin: FromPod,
	}); packet != want {
		t.Errorf("packet %+v, want %+v", packet, want)
	}
	for _, bad := range []string{`{"origin":"mars"}`, `{"origin":""}`, `{"protocol":"ICMP"}`} {
		if err := json.Unmarshal([]byte(bad), &packet); !errors.Is(err, ErrPacket) {
			t.Errorf("Unmarshal(%s) = %v, want %v", bad, err, ErrPacket)
		}
	}
}

func exposedElsewhere(p *changetracker.ServicePort) { p.ExposeOn = "pool=edge" }
