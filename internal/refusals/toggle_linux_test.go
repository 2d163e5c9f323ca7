package refusals

import (
	"flag"
	"net/netip"
	"slices"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/oracle"
)

var toggles = flag.Int("refusals.toggles", 1, "how often TestNothingGetsThroughDuringAChange changes all Services, there and back")

// toggle is what a Service is at even and at odd times. nil means that there is none.
type toggle struct{ even, odd *spec }

func toggled() []toggle {
	both, here, elsewhere := []string{nodeName, "elsewhere"}, []string{nodeName}, []string{"elsewhere"}
	open := &spec{endpoints: both}
	return []toggle{
		{open, &spec{endpoints: both, ranges: clientsOnly()}},
		{&spec{endpoints: both, ranges: clientsOnly()}, &spec{endpoints: both, ranges: []string{"198.51.100.3/32", "2001:db8:c::3/128"}}},
		{&spec{endpoints: both, external: true, ranges: clientsOnly()}, &spec{endpoints: elsewhere, external: true, ranges: clientsOnly()}},
		{open, &spec{}},
		{open, nil},
		{&spec{endpoints: both, ranges: clientsOnly()}, nil},
		{open, &spec{endpoints: both, notServing: true}},
		{open, &spec{endpoints: both, clusterIPOnly: true}},
		{&spec{endpoints: here, internal: true, external: true}, &spec{endpoints: elsewhere, internal: true, external: true}},
		{&spec{endpoints: elsewhere}, &spec{endpoints: elsewhere, internal: true, external: true}},
		{&spec{endpoints: here}, &spec{endpoints: elsewhere}},
		{open, &spec{endpoints: both, families: families()[:1]}},
	}
}

// TestNothingGetsThroughDuringAChange changes Services while packets flow. At each moment, a
// packet fares as before the change or as after it. After it, packets of flows that began before
// reach no endpoint that does not serve any more.
func TestNothingGetsThroughDuringAChange(t *testing.T) {
	for _, e := range engines() {
		t.Run(e.name, func(t *testing.T) { change(t, e) })
	}
}

func change(t *testing.T, e engine) {
	t.Helper()
	var even []spec
	for _, both := range toggled() {
		even = append(even, *both.even)
	}
	b := newBench(t, e, settings()[0], even)
	ways := b.ways()
	all := map[string][]*trial{}
	flows := &flows{bench: b, past: map[flow][]netip.AddrPort{}}
	all["stale entry"] = flows.send(ways)
	for range *toggles * 2 {
		trials := b.toggle(ways)
		all["during a change"] = append(all["during a change"], trials...)
		all["stale entry"] = append(all["stale entry"], flows.send(ways)...)
	}
	for state, trials := range all {
		all[state] = slices.DeleteFunc(trials, func(s *trial) bool { return s.isPositive() && s.leak() == "" })
	}
	b.report(all, 500)
}

// way is a sender, a destination and a kind of packet.
type way struct {
	sender
	destination

	kind    packet
	family  v1.IPFamily
	service int
}

// ways are those that a change of Services opens and closes.
func (b *bench) ways() (all []way) {
	for n := range toggled() {
		for _, family := range families() {
			for _, d := range destinations(b.cluster, n+1, family) {
				if !slices.Contains([]string{"ClusterIP", "external IP", "load balancer IP", "node port"}, d.what) || d.what == "node port" && d.to.Addr() != b.cluster.Node.Addresses[index(family)] {
					continue
				}
				for _, sender := range senders(b.world) {
					if sender.honest {
						all = append(all,
							way{sender, d, packet{protocol: desired.TCP, flags: syn}, family, n + 1},
							way{sender, d, packet{protocol: desired.UDP}, family, n + 1})
					}
				}
			}
		}
	}
	return all
}

func (b *bench) trial(w way, port uint16, verdicts ...[2]*oracle.Verdicts) *trial {
	s := &trial{sender: w.sender, packet: w.kind, what: w.what}
	s.packet.source, s.packet.destination = netip.AddrPortFrom(w.addr(w.family), port), w.to
	for _, f := range verdicts {
		s.verdicts = append(s.verdicts, f[index(w.family)])
	}
	return s
}

// toggle changes all Services, while it sends on all ways again and again.
func (b *bench) toggle(ways []way) (trials []*trial) {
	b.t.Helper()
	before, old := b.verdicts(), *b.cluster
	after := old
	after.Services, after.Slices = map[string]*v1.Service{}, map[string]*discovery.EndpointSlice{}
	for i, both := range toggled() {
		spec := both.even
		if b.toggles%2 == 0 {
			spec = both.odd
		}
		if spec != nil {
			add(&after, b.world, i+1, *spec)
		}
	}
	b.toggles++
	b.cluster = &after
	is := b.verdicts()

	stop, stopped := make(chan struct{}), make(chan struct{})
	var once sync.Once
	oneRound := make(chan struct{})
	go func() {
		defer close(stopped)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			s := b.trial(ways[b.dice.IntN(len(ways))], b.port(), before, is)
			b.send(s)
			trials = append(trials, s)
			if n == window {
				once.Do(func() { close(oneRound) })
			}
		}
	}()
	<-oneRound
	b.tell(&old, &after)
	b.sync()
	close(stop)
	<-stopped
	onOneProcessor(b.t, func() { b.flush(b.t) })
	return trials
}

// tell gives a change to the proxy.
func (b *bench) tell(old, now *oracle.Cluster) {
	for name := range toggledNames(old, now) {
		if was, is := old.Services[name], now.Services[name]; is == nil {
			b.proxy.OnServiceDelete(was)
		} else {
			b.proxy.OnServiceUpdate(was, is)
		}
	}
	for name, was := range old.Slices {
		if now.Slices[name] == nil {
			b.proxy.OnEndpointSliceDelete(was)
		}
	}
	for name, is := range now.Slices {
		b.proxy.OnEndpointSliceUpdate(old.Slices[name], is)
	}
}

func toggledNames(a, b *oracle.Cluster) map[string]bool {
	all := map[string]bool{}
	for _, c := range []*oracle.Cluster{a, b} {
		for name := range c.Services {
			all[name] = true
		}
	}
	return all
}

// flows send datagrams from the same ports all the time, so that conntrack has entries of them.
type flows struct {
	*bench

	past map[flow][]netip.AddrPort // where they may lead, by source and destination
}

type flow [2]netip.AddrPort

const flowPort = 7000

// send sends one datagram of each flow. It may reach an endpoint that its frontend had, as long as
// that serves (CT-03).
func (f *flows) send(ways []way) (trials []*trial) {
	f.t.Helper()
	verdicts, decisions := f.verdicts(), map[v1.IPFamily]map[changetracker.ServicePortName]oracle.Decision{}
	for _, family := range families() {
		decisions[family] = oracle.Decide(f.cluster, family)
	}
	for _, w := range ways {
		if w.kind.protocol != desired.UDP {
			continue
		}
		s := f.trial(w, flowPort, verdicts)
		key := flow{s.packet.source, s.packet.destination}
		serving := decisions[w.family][changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "refusals", Name: name(w.service)}, Port: "UDP", Protocol: v1.ProtocolUDP,
		}].Serving
		for _, e := range f.past[key] {
			if slices.Contains(serving, e) {
				s.kept = append(s.kept, e)
			}
		}
		for _, o := range s.outcomes() {
			if o.Verdict == "forward" && !slices.Contains(f.past[key], o.Endpoint) {
				f.past[key] = append(f.past[key], o.Endpoint)
			}
		}
		trials = append(trials, s)
	}
	f.sendAll(trials)
	f.awaitAll(slices.DeleteFunc(slices.Clone(trials), func(s *trial) bool { return !s.isPositive() }))
	return trials
}
