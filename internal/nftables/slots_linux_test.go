package nftables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/maglev"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// Shares follow the weights exactly with few slots, otherwise within one slot, but every endpoint has one. The
// numbers of slots are few, and within the bound of a service port.
func TestSharesFollowWeights(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	sizes := map[int]bool{}
	cases := [][]uint16{{1, 2, 5}, {2, 4, 10}, {65535, 1}, {65535, 65534}, {1, 127}, {1, 128}, {300, 301, 302}, slices.Repeat([]uint16{1, 65535}, 2000)}
	for range 300 {
		var weights []uint16
		for range 2 + random.IntN(400) {
			weights = append(weights, uint16(1+random.IntN(1<<(1+random.IntN(16))-1)))
		}
		cases = append(cases, weights)
	}
	for n, weights := range cases {
		most := []int{0, 64, 2048}[n%3]
		counts, size, total, divisor := shares(weights, most), 0, 0, 0
		for i, w := range weights {
			size, total, divisor = size+int(counts[i]), total+int(w), gcd(divisor, int(w))
		}
		exact := total/divisor <= exactSlots && (most == 0 || total/divisor <= most)
		if sizes[size] = true; exact && size != total/divisor {
			t.Errorf("%v: %d slots, want exactly %d", weights, size, total/divisor)
		}
		if most > 0 && size > max(most, 2*len(weights)) {
			t.Errorf("%d weights: %d slots, want at most %d", len(weights), size, most)
		}
		small := 0 // endpoints whose share is less than a slot: the others pay for their slots
		for i, w := range weights {
			if int(w)*size < total {
				small++
			}
			if slices.ContainsFunc(weights, func(o uint16) bool { return o < w && counts[slices.Index(weights, o)] > counts[i] }) {
				t.Errorf("%v: endpoint %d has %d slots, less than a lighter one", weights, i, counts[i])
			}
		}
		for i, w := range weights {
			exact := float64(size) * float64(w) / float64(total)
			if d := float64(counts[i]) - exact; counts[i] == 0 || d > 1 || -d > 1+exact*float64(2*small)/float64(size) {
				t.Errorf("%v: endpoint %d has %d of %d slots, want %.2f", weights, i, counts[i], size, exact)
			}
		}
	}
	for size := range sizes {
		if size > exactSlots && size&(size-1) != 0 {
			t.Errorf("%d slots, want at most %d or a power of two", size, exactSlots)
		}
	}
}

// TestTheSlotsOfAServiceAreBounded: a Service within the limits of the API server does not take the memory
// of all, whatever its ports, addresses, weights and policy. Those with more endpoints than slots have one to
// four slots for each.
func TestTheSlotsOfAServiceAreBounded(t *testing.T) {
	t.Parallel()
	const most = 1 << 19
	for _, policy := range []changetracker.Balancing{changetracker.Random, changetracker.SourceHash} {
		for _, c := range chance.Some(t, 4, []struct{ ports, externalIPs, endpoints, limit int }{
			{1, 0, 161, 65521}, {8, 0, 161, most}, {9, 0, 161, most}, {250, 0, 161, most}, {250, 0, 1000, 4 * 250 * 1000}, {100, 300, 100, 4 * most}, {1000, 60, 2, most}, {60000, 0, 2, most},
		}...) {
			tracker, err := changetracker.New(changetracker.Options{ObjectOptions: changetracker.ObjectOptions{
				DecorateService: func(p *changetracker.ServicePort, _ *v1.Service) { p.Balancing = policy },
				DecorateEndpoint: func(e *changetracker.Endpoint, _ *discovery.Endpoint, _ *discovery.EndpointSlice) {
					e.Weight = 1 + uint16(e.Addr.Addr().As4()[3])*250
				},
			}})
			if err != nil {
				t.Fatal(err)
			}
			of := newCluster(1, c.endpoints)
			service, slice := of.services[0], of.slices[0]
			tcp := slice.Ports[0].Protocol
			service.Spec.Ports, slice.Ports = nil, nil
			for i := range c.ports {
				name, port := fmt.Sprint("p", i), int32(1+i)
				service.Spec.Ports = append(service.Spec.Ports, v1.ServicePort{Name: name, Protocol: v1.ProtocolTCP, Port: port})
				slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: &name, Protocol: tcp, Port: &port})
			}
			for i := range c.externalIPs {
				service.Spec.ExternalIPs = append(service.Spec.ExternalIPs, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}).String())
			}
			tracker.Services.Update(nil, service)
			tracker.Endpoints.EndpointSliceUpdate(slice, false)
			total := 0
			err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
				e := &Engine{log: zap.NewNop()}
				e.begin(e.layoutFor(&desired.Globals{}), false)
				for _, change := range delta.Changes {
					if s, ok := new(desired.Resolver).Resolve(delta.After, change.Name); ok {
						total += len(s.Frontends) * e.planElements(nil, s, &e.step).lists[0].len()
					}
				}
				return nil, nil
			})
			if err != nil || total == 0 || total > c.limit {
				t.Errorf("%v, %+v: %d slots, error %v, want at most %d", policy, c, total, err, c.limit)
			}
		}
	}
}

// balanced is a service port with one frontend.
func (w *world) balanced(endpoints int, policy changetracker.Balancing) *desired.Service {
	s := &desired.Service{Name: name(0), Protocol: desired.TCP, Port: &changetracker.ServicePort{Balancing: policy}}
	for i := range endpoints {
		s.Cluster = s.Cluster.With(netip.AddrPortFrom(w.addr(244, i), 8080))
	}
	w.add(s, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, 0), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNone})
	return s
}

// Each changed slot costs a deletion and an addition, and at most a new chain and the number of slots of the
// frontend.
func TestOnlyChangedSlotsAreWritten(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		weighted := func(weights ...uint16) *desired.Service {
			s := w.balanced(len(weights), changetracker.Random)
			s.ClusterWeights = weights
			return s
		}
		without := func(gone int) *desired.Service {
			s := w.balanced(10, changetracker.SourceHash)
			s.Cluster = s.Cluster.Without(s.Cluster.Slice()[gone])
			return s
		}
		hashed := func() *desired.Service { return w.balanced(10, changetracker.SourceHash) }
		ported := w.balanced(10, changetracker.SourcePortHash)
		slotsOf := maglev.Size(10, 0)
		for title, c := range map[string]struct {
			from, to *desired.Service
			most     int
		}{
			"a weight of an exact sum": {weighted(1, 2, 5), weighted(1, 2, 6), 1 + classWrites},
			"a lower weight":           {weighted(1, 2, 6), weighted(1, 2, 5), 3 + classWrites},
			"a weight of many":         {weighted(1000, 999, 998), weighted(1000, 999, 1200), 2 * 70},
			"weights become equal":     {weighted(1, 2), weighted(2, 2), 1 + classWrites},
			"one endpoint of ten":      {hashed(), without(3), 2 * slotsOf * 12 / 100},
			"the hash of ports too":    {hashed(), ported, classWrites},
			"nothing":                  {hashed(), hashed(), 0},
		} {
			t.Run(title, func(t *testing.T) {
				if c.to.ClusterWeights != nil && slices.Min(c.to.ClusterWeights) == slices.Max(c.to.ClusterWeights) {
					c.to.ClusterWeights = nil
				}
				e, m := w.engine(t, netnstest.New(t)), model{c.from.Name: c.from}
				mustApply(t, e, m.full(w))
				mustMatch(t, e, m)
				m[c.to.Name] = c.to
				mustApply(t, e, desired.Update{Family: w.family, Changes: desired.ChangesTo(c.to), Globals: w.globals()})
				if got := e.report.Writes; got > c.most {
					t.Errorf("%d writes, want at most %d", got, c.most)
				}
				mustMatch(t, e, m)
				mustWriteNothing(t, e, m.full(w), "full sync")
			})
		}
	})
}

// classWrites is a new chain in its three verdict maps, and another class for one frontend.
const classWrites = 1 + 3 + 2

// many returns so many endpoints.
func many(n int) desired.Endpoints {
	addrs := make([]netip.AddrPort, n)
	for i := range addrs {
		addrs[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80)
	}
	return desired.EndpointsOf(addrs...)
}

// TestManySlotsChangeAsFewDo: a change of many slots has the same result as if all were arranged
// anew, and the elements that are written are the difference.
func TestManySlotsChangeAsFewDo(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 0))
	steps := chance.Few(100, 300)
	pool, w, kept := many(3000), &world{family: v1.IPv4Protocol}, 0
	for _, affinity := range []time.Duration{0, time.Hour} {
		s := w.balanced(0, changetracker.Random)
		s.Affinity, s.Port, s.Frontends[0].Action = affinity, nil, desired.Forward
		e := &Engine{log: zap.NewNop()}
		e.begin(e.layoutFor(&desired.Globals{}), false)
		var prev *placed
		have := elements{}
		for step := range steps {
			some := func(most int) (addrs []netip.AddrPort) {
				for range random.IntN(most + 1) {
					addrs = append(addrs, pool.Slice()[random.IntN(pool.Len())])
				}
				return addrs
			}
			next := *s
			next.Cluster = s.Cluster.With(some([]int{1, 5, 400}[random.IntN(3)])...).Without(some([]int{1, 5, 400}[random.IntN(3)])...)
			is := e.planElements(prev, &next, &e.step)
			pl := placer{affinity: e.state.affinity.services[s.Name]}
			if want := pl.arrange(prev.list(0), next.Cluster.Slice(), nil, 0); !slices.EqualFunc(is.lists[0], want, slices.Equal[[]target]) {
				t.Fatalf("step %d, affinity %v: slots %v, want %v", step, affinity, is.lists[0], want)
			}
			if prev != nil && len(is.lists[0]) > 2 && len(prev.lists[0]) > 0 && &is.lists[0][0][0] == &prev.lists[0][0][0] {
				kept++
			}
			var change, all written
			diff(&change, prev, is)
			change.to(have)
			diff(&all, nil, is)
			want := elements{}
			all.to(want)
			if !maps.Equal(have, want) || len(want) <= next.Cluster.Len() {
				t.Fatalf("step %d, affinity %v: %d elements, want %d", step, affinity, len(have), len(want))
			}
			s, prev = &next, is
		}
	}
	if kept < steps/6 {
		t.Errorf("%d changes keep the first slots as they are, want more", kept)
	}
}

// elements are those of all sets.
type elements map[counterKey]elementBytes

// written is what diff writes. As in a transaction, all removals come first.
type written struct {
	removed []counterKey
	added   elements
}

func (w *written) put(in setID, key, _, data elementBytes) {
	if w.added == nil {
		w.added = elements{}
	}
	w.added[counterKey{in, key}] = data
}

func (w *written) remove(in setID, key, _ elementBytes) {
	w.removed = append(w.removed, counterKey{in, key})
}

func (w *written) to(all elements) {
	for _, key := range w.removed {
		delete(all, key)
	}
	maps.Copy(all, w.added)
}

// flips are changes of a Service of many endpoints: ten of them leave and return, one by one. The
// Service is the one before and after.
func (w *world) flips(n int) (s *desired.Service, updates []desired.Update) {
	s = w.balanced(0, changetracker.Random)
	s.Port, s.Cluster, s.Frontends[0].Action = nil, many(n), desired.Forward
	for i := range 10 {
		without := *s
		without.Cluster = s.Cluster.Without(s.Cluster.Slice()[i*n/10])
		for _, version := range []*desired.Service{&without, s} {
			updates = append(updates, desired.Update{Family: w.family, Globals: w.globals(), Changes: desired.ChangesTo(version)})
		}
	}
	return s, updates
}

// What the engine allocates for one endpoint among many is a part of the slots.
func TestAFlipAmongManyCostsLittle(t *testing.T) {
	const size, limit = 5_000, 20_000
	w := &world{family: v1.IPv4Protocol}
	e := w.engine(t, netnstest.New(t))
	s, updates := w.flips(size)
	m := model{s.Name: s}
	mustApply(t, e, m.full(w))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for i := range updates {
		if r := mustApply(t, e, updates[i]); r.Writes == 0 || r.Writes > 10 {
			t.Errorf("%d writes, want a few", r.Writes)
		}
	}
	runtime.ReadMemStats(&after)
	if got := int(after.TotalAlloc-before.TotalAlloc) / len(updates); got > limit {
		t.Errorf("a change of one among %d endpoints allocates %d bytes, want at most %d", size, got, limit)
	}
	mustMatch(t, e, m)
	mustWriteNothing(t, e, m.full(w), "full sync")
}

// BenchmarkHuge measures the change of one endpoint among many in the kernel.
func BenchmarkHuge(b *testing.B) {
	w := &world{family: v1.IPv4Protocol}
	for _, size := range []int{100, 5_000, 50_000} {
		b.Run(fmt.Sprintf("E=%d", size), func(b *testing.B) {
			e := w.engine(b, netnstest.New(b))
			s, updates := w.flips(size)
			apply := func(u desired.Update) {
				if _, err := e.Apply(b.Context(), u); err != nil {
					b.Fatal(err)
				}
			}
			apply(model{s.Name: s}.full(w))
			for _, u := range updates {
				apply(u)
			}
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				apply(updates[n%len(updates)])
			}
		})
	}
}

// TestTheMostEndpoints: each up to the limit has a slot, and one log line tells of the others.
func TestTheMostEndpoints(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		policy   changetracker.Balancing
		affinity time.Duration
		most     int
	}{
		{changetracker.Random, 0, maxEndpoints},
		{changetracker.SourceHash, 0, maglev.MaxEndpoints},
		{changetracker.Random, time.Hour, maxAffinitySlot},
		{changetracker.SourceHash, time.Hour, maxAffinitySlot},
	} {
		for _, n := range []int{c.most, c.most + 1} {
			s := (&world{family: v1.IPv4Protocol}).balanced(0, c.policy)
			s.Affinity = c.affinity
			s.Cluster = many(n)
			e := &Engine{log: zap.NewNop()}
			e.begin(e.layoutFor(&desired.Globals{}), false)
			p := e.planElements(nil, s, &e.step)
			slots := map[netip.AddrPort]int{}
			for _, target := range p.lists[0].all() {
				slots[target.addr]++
			}
			if len(slots) != c.most || slots[s.Cluster.Slice()[c.most-1]] == 0 || len(e.limited) != n-c.most {
				t.Errorf("%v, affinity %v, %d endpoints: %d have slots, want %d; limited %v", c.policy, c.affinity, n, len(slots), c.most, e.limited)
			}
		}
	}
}

// TestHashedSlotsAreComputedOnce: a change of the frontends does not compute them again.
func TestHashedSlotsAreComputedOnce(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e, s := w.engine(t, netnstest.New(t)), w.balanced(10, changetracker.SourceHash)
		m := model{s.Name: s}
		mustApply(t, e, m.full(w))
		first := &e.state.placed[s.Name].lists[0][0]
		again := w.balanced(10, changetracker.SourceHash)
		w.add(again, desired.Frontend{Kind: desired.ExternalIP, VIP: w.addr(201, 0), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeAll})
		m[s.Name] = again
		mustApply(t, e, desired.Update{Family: w.family, Changes: desired.ChangesTo(again), Globals: w.globals()})
		if &e.state.placed[s.Name].lists[0][0] != first {
			t.Error("the slots were computed again")
		}
		mustMatch(t, e, m)
		mustApply(t, e, m.full(w))
		if &e.state.placed[s.Name].lists[0][0] != first {
			t.Error("a full sync has computed the slots again")
		}
	})
}

// Records of clients hold the number of a Service that is gone. The next Service with session affinity gets another
// number, also after a full sync that trusts nothing, and after numbers were taken over.
func TestNumbersOfSessionAffinityAreUsedInTurn(t *testing.T) {
	e := &Engine{}
	e.begin(layout{}, false)
	next := func(n int) uint32 {
		s, ok := e.state.affinity.service(name(n))
		if !ok {
			t.Fatal("no number is free")
		}
		e.state.affinity.release(name(n))
		return s.id
	}
	first := next(1)
	e.begin(layout{}, false)
	if second := next(2); second == first {
		t.Errorf("the number %d is used again at once", second)
	}
	e.state.affinity.adopt(name(3), 70)
	if third := next(4); third != 71 {
		t.Errorf("after 70 was taken over, the next number is %d", third)
	}
	e.state.affinity.last = maxAffinityID
	if low, lower := next(5), next(6); low != 1 || lower != 2 {
		t.Errorf("after the last number come %d and %d, want 1 and 2", low, lower)
	}
}
