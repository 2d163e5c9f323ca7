package desired

import (
	"cmp"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// byWalk is Explain without lookups: it iterates over all Services.
func (x *explainer) byWalk(packet Packet) Explanation {
	e := x.explaining(packet)
	if service, frontend := e.walkChoice(); service != nil {
		e.served(service, frontend)
		return e.Explanation
	}
	e.walkUnserved()
	return e.Explanation
}

// walk returns all resolved Services, in order of port and name.
func (e *explaining) walk() (all []*Service) {
	for name := range e.State.All() {
		s, _ := e.Resolver.Resolve(e.State, name)
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *Service) int { return cmp.Or(cmp.Compare(a.Port.Port, b.Port.Port), a.Name.Compare(b.Name)) })
	return all
}

// candidate is a frontend that a packet may be for.
type candidate struct {
	service  *Service
	frontend *Frontend
}

func (c candidate) claim() claim { return claimOf(c.service.Port, c.frontend.Kind) }

// beat replaces c by the frontend f of s if that has the better claim.
func (c *candidate) beat(s *Service, f *Frontend) {
	if c.service == nil || claimOf(s.Port, f.Kind).compare(c.claim()) < 0 {
		*c = candidate{s, f}
	}
}

func (e *explaining) walkChoice() (*Service, *Frontend) {
	var vip, nodePort candidate
	for _, s := range e.walk() {
		for i := range s.Frontends {
			switch f := &s.Frontends[i]; {
			case s.Protocol != e.Packet.Protocol || f.Port != e.Packet.Destination.Port():
			case f.VIP == e.Packet.Destination.Addr():
				vip.beat(s, f)
			case f.Kind == NodePort:
				nodePort.beat(s, f)
			}
		}
	}
	atNode := e.Globals.AcceptsNodePorts(e.Packet.Destination.Addr())
	switch {
	case vip.service == nil && (nodePort.service == nil || e.acceptsNodePorts(e.traitsOf(nodePort.service, NodePort)) != nil):
		return nil, nil
	case vip.service == nil:
		return nodePort.service, nodePort.frontend
	case nodePort.service != nil && atNode && vip.claim().yieldsTo(nodePort.claim()):
		e.because("%v is also a VIP of %v, but the Service that has the node port is older", e.Packet.Destination, vip.service.Name)
		return nodePort.service, nodePort.frontend
	}
	return vip.service, vip.frontend
}

func (e *explaining) walkUnserved() {
	addr, port := e.Packet.Destination.Addr(), e.Packet.Destination.Port()
	for _, s := range e.walk() {
		what, t := "", e.traitsOf(s, kindAt(s, addr))
		switch {
		case e.isToNode() || !hasVIP(s, addr):
		case s.Port.ClusterIP == addr && !t.ServiceIPsPass:
			what = "the cluster IP"
		case s.Port.ClusterIP != addr && t.VIPsAreLocal && slices.Contains(slices.Concat(s.Port.ExternalIPs, s.Port.LoadBalancerVIPs), addr):
			what = "a VIP"
		}
		if what == "" {
			continue
		}
		e.because("%v is %s of Service %v, which has no port %d/%v", addr, what, s.Name.NamespacedName, port, e.Packet.Protocol)
		e.Verdict = VerdictReject
		health := slices.Collect(maps.Values(e.State.HealthCheckNodePorts()))
		if t.VIPsAreLocal && e.Packet.Protocol == TCP && slices.Contains(health, port) {
			e.Verdict = VerdictPass
			e.because("%d is a health check node port, and the node has the address: the health check server answers", port)
		}
		return
	}
	all := e.walk()
	slices.SortFunc(all, func(a, b *Service) int { return a.Name.Compare(b.Name) })
	for _, s := range all {
		if err := e.acceptsNodePorts(e.traitsOf(s, NodePort)); err != nil && s.Port.NodePort == port && s.Protocol == e.Packet.Protocol {
			e.because("%d is a node port of %v, but %v", port, s.Name, err)
		}
	}
	e.noService()
}

// Explain agrees with the iteration in random States whose Services conflict.
func TestExplainFindsWhatAWalkFinds(t *testing.T) {
	seen := map[Verdict]int{}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 15))
		x := randomExplainer(t, r)
		for range 40 {
			packet := randomPacket(r)
			got, err := x.explain(packet)
			if err != nil {
				t.Fatal(err)
			}
			want := x.byWalk(packet)
			if g, w := asJSON(t, got), asJSON(t, want); g != w {
				t.Fatalf("seed %d: %+v\nexplained as  %s\nby a walk     %s", seed, packet, g, w)
			}
			seen[got.Verdict]++
		}
	}
	for v := VerdictPass; v <= VerdictDrop; v++ {
		if seen[v] < 100 {
			t.Errorf("verdict %v: %d packets, want 100 or more of each", v, seen[v])
		}
	}
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func oneOf[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// someOf returns up to two items of a list.
func someOf[T any](r *rand.Rand, from ...T) (some []T) {
	for range r.IntN(3) {
		some = append(some, oneOf(r, from...))
	}
	return some
}

// The addresses and ports that random Services and packets have.
func randomVIP(r *rand.Rand) netip.Addr { return oneOf(r, nodeIP, vip, externalIP, clusterIP) }

func randomPort(r *rand.Rand) uint16 { return oneOf[uint16](r, 80, 81, 30080, 30081) }

func randomExplainer(t *testing.T, r *rand.Rand) *explainer {
	var ports []changetracker.ServicePort
	for i := range 1 + r.IntN(8) {
		name := changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "test", Name: string(rune('a' + i))},
			Protocol:       oneOf(r, v1.ProtocolTCP, v1.ProtocolTCP, v1.ProtocolUDP),
		}
		p := changetracker.ServicePort{
			Name: name, ClusterIP: oneOf(r, clusterIP, clusterIP.Next(), clusterIP.Next().Next()), Port: randomPort(r),
			NodePort:            oneOf[uint16](r, 0, 30080, 30081),
			HealthCheckNodePort: oneOf[uint16](r, 0, 0, 81, 30081),
			ExternalPolicyLocal: r.IntN(2) == 0,
			CreationTimestamp:   oneOf(r, time.Time{}, time.Unix(1, 0), time.Unix(2, 0)),
		}
		for range r.IntN(3) {
			p.ExternalIPs = append(p.ExternalIPs, randomVIP(r))
			p.LoadBalancerVIPs = append(p.LoadBalancerVIPs, randomVIP(r))
		}
		if p.ExternallyAccessible() && r.IntN(3) == 0 {
			p.ClusterIP, p.Family = netip.Addr{}, v1.IPv4Protocol
		}
		ports = append(ports, p)
	}
	x := explainerOf(t, ports, someOf(r, local(1), remote(2), terminating(remote(3)))...)
	x.Resolver.DenyNodeExternalIPs = r.IntN(4) == 0
	x.Resolver.Kinds = oneOf(r, nil, nil, nil, []Kind{ClusterIP}, []Kind{ClusterIP, LoadBalancer, ExternalIP}, []Kind{NodePort, LoadBalancer})
	x.Resolver.Node.Addresses = x.NodeAddresses
	x.Globals.NodeAddresses = x.NodeAddresses
	if r.IntN(4) == 0 {
		x.Globals.NodePortAddresses = nil
	}
	own := make([]Traits, 9) // one for each Service, as in a Hybrid; the last for addresses without one
	for i := range own {
		own[i] = Traits{ServiceIPsPass: r.IntN(3) == 0, VIPsAreLocal: r.IntN(3) == 0, LoopbackNodePorts: r.IntN(2) == 0}
	}
	x.Traits = func(s *Service) Traits {
		if s == nil {
			return own[8]
		}
		return own[s.Name.Name[0]-'a']
	}
	return x
}

func randomPacket(r *rand.Rand) Packet {
	to := oneOf(r, randomVIP(r), clusterIP.Next(), netip.MustParseAddr("10.96.7.7"), netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("127.0.0.1"))
	p := packetTo(netip.AddrPortFrom(to, randomPort(r)).String())
	p.Protocol, p.Origin = oneOf(r, TCP, TCP, UDP, SCTP), oneOf(r, FromOutside, FromPod, FromNode)
	return p
}
