package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// explainer explains packets and says which endpoints get some, as *proxier.Proxier does.
type explainer interface {
	Explain(ctx context.Context, packet desired.Packet) (desired.Explanation, error)
	Sends(endpoints ...netip.AddrPort) []proxier.Sending
}

// Explanations compares Explain with real packets. Providers of the factory must have the
// methods Explain and Sends of *proxier.Proxier; they explain random packets to random Services; each packet is sent, and must have
// the explained outcome; and the endpoint that answers must be one to which Sends says that the
// frontend sends. At least so many packets are sent, in all setups of Conformance, and more
// until each verdict has one in a hundred. A failure prints the seed, which repeats the run; 0 means
// a random seed.
//
// It needs Linux and root, and takes about a minute for 2,000 packets.
func Explanations(t *testing.T, packets int, seed uint64, factory Factory) {
	t.Helper()
	x := &explanations{
		atOnce: packetsAtOnce, inRound: min(packetsInRound, packets/len(setups())+1), share: packets / 100, check: (*trial).check,
	}
	x.run(t, packets, seed, factory)
}

// run sends packets until so many are sent, in all setups.
func (x *explanations) run(t *testing.T, packets int, seed uint64, factory Factory) {
	t.Helper()
	if seed == 0 {
		seed = rand.Uint64()
	}
	x.suite = newSuite(t, Features{}, factory, func(c *proxier.Config) { c.Node.Zone = nodeZone })
	x.dice, x.seen = rand.New(rand.NewPCG(seed, 0)), map[desired.Verdict]int{}
	rounds := setups()
	for n := 0; x.sent < packets || x.lacks(); n++ {
		x.round(t.Context(), t, rounds[n%len(rounds)])
		if t.Failed() {
			t.Fatalf("seed %d, setup %q", seed, rounds[n%len(rounds)])
		}
	}
	t.Logf("seed %d: %d packets, as explained: %v", seed, x.sent, x.seen)
}

// lacks reports whether a verdict has not had its share yet.
func (x *explanations) lacks() bool {
	return min(x.seen[desired.VerdictPass], x.seen[desired.VerdictForward], x.seen[desired.VerdictReject], x.seen[desired.VerdictDrop]) < x.share
}

// explanations is one run of Explanations or Traces.
type explanations struct {
	*suite

	// check sends a packet and compares what happens with the explanation.
	check func(*trial, context.Context, *desired.Explanation) error
	// inRound are the packets to one set of Services, atOnce those on their way.
	inRound, atOnce int
	// share is how many packets of each verdict are sent at least.
	share int

	dice *rand.Rand
	sent int
	seen map[desired.Verdict]int
}

const (
	// nodeZone is the node's zone, for topology hints.
	nodeZone        = "zone-a"
	servicesInRound = 12
	packetsInRound  = 256
	packetsAtOnce   = 64
)

// round publishes Services, and sends packets to them.
func (x *explanations) round(ctx context.Context, t *testing.T, s setup) {
	t.Helper()
	st := &stage{suite: x.suite, provider: x.use(ctx, t, s)}
	explainer, ok := st.provider.(explainer)
	if !ok {
		t.Fatalf("%T explains no packets", st.provider)
	}
	if x.dice.IntN(2) == 0 {
		st.provider.OnServiceCIDRsChanged(serviceCIDRs())
		defer st.provider.OnServiceCIDRsChanged(nil)
	}
	services := make([]service, servicesInRound)
	for i := range services {
		services[i] = x.service()
	}
	st.publish(ctx, t, services...)
	defer func() { st.publish(ctx, t) }()

	var sending sync.WaitGroup
	slots := make(chan struct{}, x.atOnce)
	errs := make([]error, x.inRound)
	for i := range errs {
		trial := x.trial(st)
		trial.sends = explainer.Sends
		explanation, err := explainer.Explain(ctx, trial.packet)
		if err != nil {
			t.Fatalf("explain %+v: %v", trial.packet, err)
		}
		if trial.losesAnswers(&explanation) {
			continue
		}
		x.sent++
		x.seen[explanation.Verdict]++
		slots <- struct{}{}
		sending.Go(func() {
			defer func() { <-slots }()
			errs[i] = x.check(trial, ctx, &explanation)
		})
	}
	sending.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

// service returns a random service.
func (x *explanations) service() service {
	s := service{external: x.dice.IntN(4) > 0, options: []ServiceOption{Created(time.Unix(int64(1+x.dice.IntN(3)), 0))}}
	if s.external && x.dice.IntN(4) == 0 { // several services have it
		s.nodePort = idleHostPort
		if x.dice.IntN(2) == 0 {
			s.options = append(s.options, ExternalIPs("192.0.2.10", "2001:db8:2::10"), atNodePort)
		}
	}
	for _, option := range []struct {
		ServiceOption

		in int // how rare
	}{
		{InternalPolicyLocal(), 3},
		{ExternalPolicyLocal(), 2},
		{healthChecked, 4},
		{ClientAffinity(time.Hour), 4},
		{balanced(changetracker.Balancing(x.dice.IntN(4))), 3},
		{SourceRanges(someOf(x.dice,
			"198.51.100.2/32", "198.51.100.3/32", "10.244.1.0/28", "192.0.2.0/24", "192.0.2.20/32",
			"2001:db8:c::2/128", "2001:db8:c::3/128", "fd00:10:244:1::/80", "2001:db8:2::/64", "2001:db8:2::20/128",
		)...), 3},
	} {
		if x.dice.IntN(option.in) == 0 {
			s.options = append(s.options, option.ServiceOption)
		}
	}
	if s.external && x.dice.IntN(6) == 0 {
		s.vip = localVIP // several services may have it
	}
	for _, at := range someOf(x.dice, pod0, pod1, pod2, remote0, remote1) {
		s.endpoints = append(s.endpoints, endpoint{at: at, condition: x.condition()})
	}
	if x.dice.IntN(6) == 0 {
		s.endpoints = nil
	}
	return s
}

// someOf returns a random subset, in order.
func someOf[T any](dice *rand.Rand, all ...T) []T {
	return slices.DeleteFunc(all, func(T) bool { return dice.IntN(2) == 0 })
}

// condition returns a random condition, mostly ready, and often with hints or a weight.
func (x *explanations) condition() EndpointOption {
	switch x.dice.IntN(8) {
	case 0:
		return NotServing()
	case 1:
		return Terminating()
	case 2, 3, 4:
		zone := []string{nodeZone, "zone-b"}[x.dice.IntN(2)]
		return func(e *discovery.Endpoint) {
			e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: zone}}}
		}
	case 5:
		return weight(x.dice.IntN(4))
	default:
		return nil
	}
}

// trial is one packet and its sender.
type trial struct {
	from    sender
	at      place
	network string
	packet  desired.Packet
	world   *Topology
	sends   func(...netip.AddrPort) []proxier.Sending
}

// trial returns a random packet to an address of a service.
func (x *explanations) trial(s *stage) *trial {
	places := []place{client, otherClient, node, nodeMain, nodeAsVIP, pod0, pod1, pod2, remote0}
	at := places[x.dice.IntN(len(places))]
	family := families()[x.dice.IntN(2)]
	targets := []target{
		clusterIP, clusterIP, undefinedPort, otherPortOfVIP, unallocatedIP, nodesServiceIP, externalIP, externalIP, loadBalancer, loadBalancer,
		nodePort, nodePort, nodePortSecondary, nodePortClientLink, nodePortPodLink, nodePortLocalVIP, cloudLoadBalancer,
		healthOfNode, healthOfVIP, healthOfClusterIP,
	}
	if at == node || at == nodeMain || at == nodeAsVIP {
		targets = append(targets, nodePortLoopback) // other hosts have a loopback address of their own
	}
	to := s.services[x.dice.IntN(len(s.services))].targets(x.world, family)[targets[x.dice.IntN(len(targets))]]
	one := &trial{from: s.sender(at, family), at: at, network: "tcp", world: x.world}
	one.packet = desired.Packet{Protocol: desired.TCP, Source: one.from.addr, Destination: to}
	if x.dice.IntN(2) == 0 {
		one.network, one.packet.Protocol = "udp", desired.UDP
	}
	one.packet.Origin, one.packet.Interface = origin(at)
	return one
}

// origin returns the origin by the names of Topology's links.
func origin(at place) (from desired.Origin, link string) {
	switch at {
	case node, nodeMain, nodeAsVIP, nodeAnywhere:
		return desired.FromNode, ""
	case pod0, pod1, pod2:
		return desired.FromPod, "pod" + string(at[len(at)-1])
	case client, otherClient:
		return desired.FromOutside, "client"
	case router, remote0, remote1:
		return desired.FromOutside, "uplink"
	}
	return 0, ""
}

// losesAnswers reports whether the answer may bypass the node: Topology's router forwards
// packets between remote pods directly, which no proxy can change.
func (s *trial) losesAnswers(e *desired.Explanation) bool {
	return s.at == remote0 && slices.ContainsFunc(e.Endpoints, func(p desired.ExplainedEndpoint) bool {
		return p.Excluded == "" && !p.Local && !p.Masquerade
	})
}

// check sends the packet, and compares the outcome with the explanation.
func (s *trial) check(ctx context.Context, e *desired.Explanation) error {
	opts := AskOptions{Timeout: answerTimeout}
	if e.Verdict == desired.VerdictDrop || e.Verdict == desired.VerdictPass {
		opts.Flusher = s.world.flusher(&Features{SourceLost: true}, s.network) // the engine may be such one
	}
	answer, err := s.from.askWith(ctx, s.network, s.packet.Destination, opts)
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("%s of %s %v -> %v: %s\nexplained as %v %v: %q\nendpoints %v", s.network, s.at, s.packet.Source,
			s.packet.Destination, fmt.Sprintf(format, args...), e.Verdict, e.Service, e.Reasons, e.Endpoints)
	}
	switch e.Verdict {
	case desired.VerdictForward:
		if err != nil {
			return wrong("got %v", err)
		}
		if fault := s.judge(answer, e); fault != "" {
			return wrong("%s", fault)
		}
	case desired.VerdictReject:
		if !errors.Is(err, ErrRefused) {
			return wrong("got %+v, %v, want it refused", answer, err)
		}
	case desired.VerdictDrop:
		if !errors.Is(err, ErrTimeout) && !errors.Is(err, ErrDroppedLocally) {
			return wrong("got %+v, %v, want no answer", answer, err)
		}
	case desired.VerdictPass:
		if err == nil && answer.Local != s.packet.Destination {
			return wrong("answered at %v, want it left alone", answer.Local)
		}
	}
	return nil
}

// judge checks the answer to a forwarded packet.
func (s *trial) judge(answer Answer, e *desired.Explanation) string {
	i := slices.IndexFunc(e.Endpoints, func(p desired.ExplainedEndpoint) bool {
		return p.Addr == answer.Local && p.Excluded == ""
	})
	if i < 0 {
		return fmt.Sprintf("answered at %v, which is not among the endpoints that may be chosen", answer.Local)
	}
	key := desired.Key{VIP: e.Frontend.VIP, Port: e.Frontend.Port, Protocol: s.packet.Protocol}
	if said := s.sends(answer.Local); !slices.ContainsFunc(said, func(is proxier.Sending) bool { return is.Service == *e.Service && slices.Contains(is.Frontends, key) }) {
		return fmt.Sprintf("%v answered, to which %v sends nothing, says the node: %+v", answer.Local, key, said)
	}
	seen := answer.Source.Addr()
	isNodes := func(a netip.Addr) bool { return slices.Contains(s.world.nodeAddrs(), a) }
	switch {
	case e.Endpoints[i].Masquerade && (!isNodes(seen) || seen == s.packet.Source && !isNodes(s.packet.Source)):
		return fmt.Sprintf("%v saw source %v, want a masqueraded one", answer.Local, seen)
	case !e.Endpoints[i].Masquerade && seen != s.packet.Source:
		return fmt.Sprintf("%v saw source %v, want it kept", answer.Local, seen)
	}
	return ""
}

// nodeAddrs returns all addresses of the node.
func (t *Topology) nodeAddrs() []netip.Addr {
	addrs := slices.Clone(t.Node.Addrs)
	for _, family := range families() {
		addrs = append(addrs, localVIP(family), localServiceIP(family))
	}
	return addrs
}

var _ explainer = (*proxier.Proxier)(nil)
