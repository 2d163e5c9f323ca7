package changetracker

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// nodesOfViews are nodes, some of which random endpoints and hints name.
func nodesOfViews() []Node {
	return []Node{{Name: "n0", Zone: "1"}, {Name: "n1", Zone: "22"}, {Name: "n1"}, {Zone: "1"}, {Name: "n2", Zone: "4"}}
}

// randomHints gives all endpoints of a slice hints, or some of them.
func randomHints(r *rand.Rand, s *discovery.EndpointSlice) {
	odds := r.IntN(3)
	for i := range s.Endpoints {
		if r.IntN(4) >= odds {
			s.Endpoints[i].Hints = &discovery.EndpointHints{
				ForZones: []discovery.ForZone{{Name: pick(r, "1", "22")}},
				ForNodes: pick(r, nil, []discovery.ForNode{{Name: pick(r, "n0", "n1")}}),
			}
		}
	}
}

// The view of a node is the same in any tracker, and agrees with the specification.
func TestAnyNodesView(t *testing.T) {
	differ := 0
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 7))
		nodes := nodesOfViews()
		trackers := make([]*Tracker, len(nodes))
		for i, node := range nodes {
			trackers[i] = mustTracker(t, func(o *Options) { o.Node = node })
		}
		for i := range 10 {
			service, slice := randomService(r, pick(r, "a", "b", "c")), randomSlice(r, fmt.Sprint("slice-", i))
			service.Spec.InternalTrafficPolicy = pick(r, nil, new(v1.ServiceInternalTrafficPolicyLocal))
			randomHints(r, slice)
			for _, tracker := range trackers {
				tracker.Services.Update(nil, service)
				tracker.Endpoints.EndpointSliceUpdate(slice, false)
			}
		}
		for _, family := range bothFamilies() {
			for i, tracker := range trackers {
				state, _ := applyAll(t, tracker, family)
				for j, node := range nodes {
					own, _ := applyAll(t, trackers[j], family)
					got, want := dumpView(t, state.For(node)), dumpView(t, own.For(own.Node()))
					if got != want {
						t.Fatalf("seed %d: the view of %+v on the tracker of %+v is\n%swant\n%s", seed, node, nodes[i], got, want)
					}
					if want != dumpView(t, state.For(nodes[i])) {
						differ++
					}
				}
			}
		}
	}
	if differ < 100 {
		t.Errorf("two nodes had different views %d times only", differ)
	}
}

func dumpView(t *testing.T, v View) string {
	t.Helper()
	var lines []string
	for name, p := range v.State().All() {
		s, ok := v.Select(name)
		want := naiveSelect(p, v.State().Endpoints(name), v.Node())
		line := fmt.Sprint(name, name.Protocol, ok, addrs(s.Cluster), addrs(s.Local), addrs(s.All), s.Any, v.LocalReady(name.NamespacedName))
		if got := fmt.Sprint(name, name.Protocol, true, addrs(want.Cluster), addrs(want.Local), addrs(want.All), want.Any,
			naiveLocalReady(v, name)); got != line {
			t.Errorf("%+v: Select, LocalReady = %s, want %s", v.Node(), line, got)
		}
		lines = append(lines, line+"\n")
	}
	slices.Sort(lines)
	return fmt.Sprint(lines)
}

func naiveLocalReady(v View, name ServicePortName) int {
	found := map[netip.Addr]bool{}
	service, _ := v.State().services.Get(name.NamespacedName)
	for _, p := range service.ports {
		for _, e := range p.endpoints.Slice() {
			if v.Local(&e) && e.Ready {
				found[e.Addr.Addr()] = true
			}
		}
	}
	return len(found)
}

func TestViewOfWhatIsNotThere(t *testing.T) {
	tracker := mustEndpointTracker(t) // it has endpoints, but no service ports
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1", onNode("here"))), false)
	state, _ := applyAll(t, tracker, v1.IPv4Protocol)
	view := state.For(Node{Name: "here"})
	for _, name := range []ServicePortName{http, portName("x", v1.ProtocolTCP)} {
		if _, ok := view.Select(name); ok {
			t.Errorf("there is a selection of %v, which is no service port", name)
		}
	}
}

// The views of one node and of 100 others cost the same for each service port, and the
// State is not copied: there is one allocation for each list that is not all endpoints.
// Budget: 1 µs more than the tracker's own node.
func BenchmarkViewsOfAllNodes(b *testing.B) {
	const services, endpoints = 1_000, 10
	tracker := benchTracker(b)
	for i := range services {
		tracker.Services.Update(nil, benchService(i))
		tracker.Endpoints.EndpointSliceUpdate(benchSlice(i, 0, i*endpoints, endpoints), false)
	}
	state, _ := applyAll(b, tracker, v1.IPv4Protocol)
	names := make([]ServicePortName, 0, state.Len())
	for name := range state.All() {
		names = append(names, name)
	}
	others := make([]Node, 100)
	for i := range others {
		others[i] = Node{Name: fmt.Sprintf("node-%d", i), Zone: "zone-a"}
	}
	for what, nodes := range map[string][]Node{"own": {state.Node()}, "others": others} {
		b.Run(fmt.Sprintf("%s/N=%d/E=%d", what, services, endpoints), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				view := state.For(nodes[i%len(nodes)])
				for _, name := range names {
					view.Select(name)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/services, "ns/port")
		})
	}
}
