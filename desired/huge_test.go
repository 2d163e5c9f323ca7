package desired

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"runtime"
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
		// Some seeds have no ready endpoints, or no hints, or equal weights.
		ready, hints, weights := random.IntN(3), random.IntN(2), uint16(1+random.IntN(2))
		var endpoints []changetracker.Endpoint
		for n := range []int{0, 3, 20, 400}[random.IntN(4)] {
			e := changetracker.Endpoint{
				Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 9), byte(n >> 1)}), uint16(8080+n&1)), // two of each address
				Node: []string{"node-1", "node-2", ""}[random.IntN(3)], Weight: 1 + uint16(random.IntN(int(weights))),
				Ready: random.IntN(3) < ready, Serving: random.IntN(2) == 0, Terminating: random.IntN(2) == 0,
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
		err = tracker.Apply(v1.IPv4Protocol, func(step changetracker.Step) ([]changetracker.ServicePortName, error) {
			walk, select_ := Resolver{Node: node}, Resolver{Node: node, EditSelection: naive}
			got, _ := walk.Resolve(step.After, webName)
			want, _ := select_.Resolve(step.After, webName)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("seed %d:\n%+v\nwant\n%+v", seed, got, want)
			}
			for what, n := range map[string]int{
				"cluster": len(got.Cluster), "local": len(got.Local), "weights": len(got.ClusterWeights) + len(got.LocalWeights),
				"listed": len(got.Listed), "not all serve": len(endpoints) - len(got.Serving), "not all chosen": len(got.Serving) - len(got.Cluster),
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

// What one changed endpoint allocates, until the engine has its Update, is the slice and the
// addresses that the Update has: at most two lists, of those that get connections and of all that
// serve.
func TestAFlipCopiesNoEndpoints(t *testing.T) {
	const calls, size = 10, 5_000
	flip := flippingHuge(t, size)
	flip()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range calls {
		flip()
	}
	runtime.ReadMemStats(&after)
	const address = 32
	if got, limit := int(after.TotalAlloc-before.TotalAlloc)/calls, 70_000+2*address*size; got > limit {
		t.Errorf("a flip among %d endpoints allocates %d bytes, want at most %d", size, got, limit)
	}
}
