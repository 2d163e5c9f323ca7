package desired

import (
	"errors"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// One walk over the endpoints decides as Select does, whose lists EditSelection gets: for any
// policies, hints, weights and conditions, and for more endpoints than one part of a list has.
func TestOneWalkDecidesAsSelect(t *testing.T) {
	naive := func(_ changetracker.View, _ *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection {
		return s
	}
	used := map[string]int{}
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 0))
		node := changetracker.Node{Name: []string{"node-1", ""}[random.IntN(2)], Zone: []string{"a", ""}[random.IntN(2)]}
		tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: node})
		if err != nil {
			t.Fatal(err)
		}
		port := changetracker.ServicePort{
			Name: webName, ClusterIP: netip.MustParseAddr("10.96.0.10"), Port: 80,
			InternalPolicyLocal: random.IntN(2) == 0, ExternalPolicyLocal: random.IntN(2) == 0, EndConnections: random.IntN(2) == 0,
		}
		if random.IntN(2) == 0 {
			port.NodePort = 30080
		}
		if _, err := tracker.Services.Set(webName.NamespacedName, port); err != nil {
			t.Fatal(err)
		}
		port.KeepFlows = random.IntN(3) == 0
		port.Failover = changetracker.Failover{Share: uint8(50 * random.IntN(3)), End: random.IntN(2) == 0}
		// Some seeds have no ready endpoints, or no hints, or equal weights, or one group.
		groups, ready, hints, weights := 1+random.IntN(3), random.IntN(3), random.IntN(2), uint16(1+random.IntN(2))
		var endpoints []changetracker.Endpoint
		for n := range []int{0, 3, 20, 400}[random.IntN(4)] {
			e := changetracker.Endpoint{
				Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 9), byte(n >> 1)}), uint16(8080+n&1)), // two of each address
				Node: []string{"node-1", "node-2", ""}[random.IntN(3)], Weight: 1 + uint16(random.IntN(int(weights))),
				Ready: random.IntN(3) < ready, Serving: random.IntN(2) == 0, Terminating: random.IntN(2) == 0,
			}
			if e.Priority = uint8(random.IntN(groups)); random.IntN(10) == 0 {
				e.Maintenance = groups > 1
			}
			if hints > 0 {
				e.ZoneHints = []string{[]string{"a", "b"}[random.IntN(2)]}
			}
			if !e.Ready && !e.Serving && !e.Terminating {
				e.Terminating = true
			}
			endpoints = append(endpoints, e)
		}
		if _, err := tracker.Endpoints.Set(webName, endpoints...); err != nil {
			t.Fatal(err)
		}
		err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			walk, select_ := Resolver{Node: node}, Resolver{Node: node, EditSelection: naive}
			got, _ := walk.Resolve(delta.After, webName)
			want, _ := select_.Resolve(delta.After, webName)
			if !sameService(got, want) {
				t.Errorf("seed %d:\n%+v\nwant\n%+v", seed, got, want)
			}
			for what, n := range map[string]int{
				"cluster": got.Cluster.Len(), "local": got.Local.Len(), "weights": len(got.ClusterWeights) + len(got.LocalWeights),
				"listed": got.Listed.Len(), "not all serve": len(endpoints) - got.Serving.Len(), "not all chosen": got.Serving.Len() - got.Cluster.Len(),
			} {
				used[what] += min(n, 1)
			}
			return nil, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for what, n := range used {
		if n < 10 {
			t.Errorf("%d seeds have %s, want more", n, what)
		}
	}
}

// randomHuge is a Service of up to a thousand endpoints, which changes.
type randomHuge struct {
	*rand.Rand

	tracker   *changetracker.Tracker
	port      changetracker.ServicePort
	endpoints map[netip.AddrPort]changetracker.Endpoint
	node      changetracker.Node
	// mixed says that endpoints differ in conditions, hinted, weighted and grouped that some have that.
	mixed, hinted, weighted, grouped bool
}

func (h *randomHuge) flip() bool { return h.IntN(2) == 0 }

// change changes some endpoints, and sometimes what the others depend on.
func (h *randomHuge) change() {
	for n := []int{1, 1, 3, 40, 600}[h.IntN(5)]; n > 0; n-- {
		at := h.IntN(1000)
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(at >> 9), byte(at >> 1)}), uint16(8080+at&1)) // two of each address
		e := changetracker.Endpoint{Addr: addr, Ready: true, Serving: true, Node: []string{"node-1", "node-2", "node-3", ""}[h.IntN(4)]}
		switch {
		case h.IntN(3) == 0:
			delete(h.endpoints, addr)
			continue
		case h.mixed:
			e.Ready, e.Serving, e.Terminating = h.flip(), h.flip(), h.flip()
			e.Terminating = e.Terminating || !e.Ready && !e.Serving
		}
		if h.hinted {
			e.ZoneHints = []string{[]string{"a", "b"}[h.IntN(2)]}
		}
		if h.weighted {
			e.Weight = uint16(1 + h.IntN(2))
		}
		if h.grouped {
			e.Priority, e.Maintenance = uint8(h.IntN(3)), h.IntN(8) == 0
		}
		h.endpoints[addr] = e
	}
	switch h.IntN(14) {
	case 12:
		h.grouped = h.flip()
	case 13:
		h.port.KeepFlows = h.flip()
		h.port.Failover = changetracker.Failover{Share: uint8(50 * h.IntN(3)), End: h.flip()}
	case 0:
		h.mixed = h.flip()
	case 1:
		h.hinted = h.flip()
	case 2:
		h.weighted = h.flip()
	case 3:
		h.port.InternalPolicyLocal, h.port.ExternalPolicyLocal = h.flip(), h.flip()
	case 4:
		h.port.EndConnections = h.flip()
	case 5:
		h.port.NodePort = 30080 - h.port.NodePort
	case 6:
		h.node.Zone = []string{"a", "b", ""}[h.IntN(3)]
		h.tracker.SetNode(h.node)
	}
}

// A Service with many endpoints, of which each version is made from the previous one, is always what
// it is from the whole State, also after Updates that fail.
func TestAHugeServiceIsResolvedAsFromScratch(t *testing.T) {
	kinds, most := map[string]int{}, 0
	for seed := range uint64(2) {
		h := &randomHuge{Rand: rand.New(rand.NewPCG(seed, 0)), node: changetracker.Node{Name: "node-1", Zone: "a"}, endpoints: map[netip.AddrPort]changetracker.Endpoint{}}
		var err error
		if h.tracker, err = changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: h.node}); err != nil {
			t.Fatal(err)
		}
		h.port = changetracker.ServicePort{Name: webName, ClusterIP: netip.MustParseAddr("10.96.0.10"), Port: 80}
		u := NewUpdater()
		for step := range 100 {
			h.change()
			if _, err := h.tracker.Services.Set(webName.NamespacedName, h.port); err != nil {
				t.Fatal(err)
			}
			if _, err := h.tracker.Endpoints.Set(webName, slices.Collect(maps.Values(h.endpoints))...); err != nil {
				t.Fatal(err)
			}
			most = max(most, len(h.endpoints))
			err := h.tracker.Apply(v1.IPv4Protocol, func(s changetracker.Delta) ([]changetracker.ServicePortName, error) {
				resolver := Resolver{Node: h.node}
				_, goesOn := u.known[webName]
				update := u.Next(s, resolver, Globals{}, h.IntN(20) == 0)
				for got := range update.Services() {
					want, _ := resolver.Resolve(s.After, webName)
					if !sameService(got, want) {
						t.Fatalf("seed %d, step %d:\n%+v\nwant\n%+v", seed, step, got, want)
					}
					count := func(what string, is bool) {
						if is {
							kinds[what]++
						}
					}
					count("full", update.Full)
					count("goes on", goesOn && !update.Full)
					count("weights", want.ClusterWeights != nil || want.LocalWeights != nil)
					count("some serve", want.Serving.Len() < len(h.endpoints))
					count("some are chosen", want.Cluster.Len() > 0 && want.Cluster.Len() < want.Serving.Len())
					count("local", want.Local.Len() > 0)
					count("listed", want.Listed.Len() > 0)
				}
				switch h.IntN(6) {
				case 0:
					return nil, errors.New("the data plane is away")
				case 1:
					u.Done([]changetracker.ServicePortName{webName})
					u.Retry(webName)
					return nil, nil
				}
				u.Done(nil)
				return nil, nil
			})
			if err != nil && err.Error() != "the data plane is away" {
				t.Fatal(err)
			}
		}
	}
	for _, what := range []string{"goes on", "full", "weights", "some serve", "some are chosen", "local", "listed"} {
		if kinds[what] < 10 {
			t.Errorf("%s: %d times, want more: %v", what, kinds[what], kinds)
		}
	}
	if most < 500 {
		t.Errorf("never more than %d endpoints", most)
	}
}

// sameService reports whether two Services are equal, however their lists came about.
func sameService(a, b *Service) bool {
	x, y := *a, *b
	for _, lists := range [][2]*Endpoints{{&x.Cluster, &y.Cluster}, {&x.Local, &y.Local}, {&x.Serving, &y.Serving}, {&x.Listed, &y.Listed}} {
		if !slices.Equal(lists[0].Slice(), lists[1].Slice()) {
			return false
		}
		*lists[0], *lists[1] = Endpoints{}, Endpoints{}
	}
	return reflect.DeepEqual(x, y)
}

// What one changed endpoint allocates, until the engine has its Update, is in proportion to the
// slice, however many endpoints the Service has.
func TestAFlipCostsItsSlice(t *testing.T) {
	const calls, limit = 20, 60_000
	for _, size := range []int{1_000, 5_000} {
		flip := flippingHuge(t, size)
		flip() // the first one goes through all
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range calls {
			flip()
		}
		runtime.ReadMemStats(&after)
		if got := int(after.TotalAlloc-before.TotalAlloc) / calls; got > limit {
			t.Errorf("a flip among %d endpoints allocates %d bytes, want at most %d", size, got, limit)
		}
	}
}
