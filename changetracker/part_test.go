package changetracker

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/chance"
)

func nameIn(text string) types.NamespacedName {
	namespace, name, _ := strings.Cut(text, "/")
	return types.NamespacedName{Namespace: namespace, Name: name}
}

// vipOf is the ClusterIP with a number.
func vipOf(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)}) }

// setPort sets a Service with one port, which has these frontends. ClusterIP 0 is none.
func setPort(tb testing.TB, tracker *Tracker, name string, clusterIP int, edits ...func(*ServicePort)) {
	tb.Helper()
	p := ServicePort{Name: ServicePortName{NamespacedName: nameIn(name), Protocol: v1.ProtocolTCP}, Family: v1.IPv4Protocol, Port: 80}
	if clusterIP != 0 {
		p.ClusterIP = vipOf(clusterIP)
	}
	for _, edit := range edits {
		edit(&p)
	}
	if _, err := tracker.Services.Set(p.Name.NamespacedName, p); err != nil {
		tb.Fatal(err)
	}
}

func nodePort(n uint16) func(*ServicePort) { return func(p *ServicePort) { p.NodePort = n } }

func externalIP(text string) func(*ServicePort) {
	return func(p *ServicePort) { p.ExternalIPs = append(p.ExternalIPs, netip.MustParseAddr(text)) }
}

// applyPart applies a part of IPv4, and returns its Delta and the names of its Services.
func applyPart(tb testing.TB, tracker *Tracker, part Part) (delta Delta, services []string) {
	tb.Helper()
	err := tracker.ApplyPart(v1.IPv4Protocol, part, func(d Delta) ([]ServicePortName, error) {
		delta = d
		return nil, nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	for _, c := range delta.Changes {
		services = append(services, c.Name.NamespacedName.String())
	}
	return delta, slices.Compact(services)
}

// byNamespace counts Services.
func byNamespace(services []string) map[string]int {
	counts := map[string]int{}
	for _, s := range services {
		counts[nameIn(s).Namespace]++
	}
	return counts
}

// Namespaces share a part: who has few gets all, and what others have left is shared by those with many.
func TestAPartIsShared(t *testing.T) {
	for name, c := range map[string]struct {
		dirty map[string]int // by namespace; "big" is the oldest
		size  int
		want  map[string]int
	}{
		"one namespace":            {map[string]int{"big": 100}, 10, map[string]int{"big": 11}},
		"all have few":             {map[string]int{"big": 3, "b": 2}, 10, map[string]int{"big": 3, "b": 2}},
		"one has few":              {map[string]int{"big": 100, "b": 2}, 10, map[string]int{"big": 9, "b": 2}},
		"two have many":            {map[string]int{"big": 100, "b": 50, "c": 1}, 21, map[string]int{"big": 11, "b": 10, "c": 1}},
		"everything":               {map[string]int{"big": 100, "b": 1}, 0, map[string]int{"big": 100, "b": 1}},
		"one less than everything": {map[string]int{"big": 5}, 3, map[string]int{"big": 4}},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			applyPart(t, tracker, Part{})
			all := 0
			for _, namespace := range []string{"big", "b", "c"} {
				for range c.dirty[namespace] {
					all++
					setPort(t, tracker, fmt.Sprintf("%s/%d", namespace, all), all)
				}
			}
			delta, services := applyPart(t, tracker, Part{Size: c.size})
			if got := byNamespace(services); !maps.Equal(got, c.want) {
				t.Errorf("the part has %v, want %v (with the oldest change beyond the size)", got, c.want)
			}
			if delta.More != (len(services) < all) || delta.After.Len() != len(services) {
				t.Errorf("More = %v with %d of %d Services, and %d in the State", delta.More, len(services), all, delta.After.Len())
			}
		})
	}
}

// A small change that comes while a large one of another namespace is applied is in the next part, and an important
// Service is whatever comes before it in its own. A Service counts by its ports.
func TestASmallChangeIsInTheNextPart(t *testing.T) {
	tracker := mustTracker(t)
	applyPart(t, tracker, Part{})
	for i := range 10_000 {
		setPort(t, tracker, fmt.Sprintf("big/%d", i), i+1)
	}
	part := Part{Size: 100, First: []types.NamespacedName{nameIn("big/important"), nameIn("big/none")}}
	applyPart(t, tracker, part)
	setPort(t, tracker, "small/web", 20_000)
	setPort(t, tracker, "big/important", 20_001)
	_, services := applyPart(t, tracker, part)
	if len(services) > 103 || !slices.Contains(services, "small/web") || !slices.Contains(services, "big/important") {
		t.Errorf("a part of %d Services has small/web: %v and big/important: %v, want 103 and both",
			len(services), slices.Contains(services, "small/web"), slices.Contains(services, "big/important"))
	}
	tracker = mustTracker(t)
	applyPart(t, tracker, Part{})
	for service := range 10 {
		var ports []ServicePort
		for port := range 50 {
			name := ServicePortName{NamespacedName: nameIn(fmt.Sprintf("many/%d", service)), Port: fmt.Sprint(port), Protocol: v1.ProtocolTCP}
			ports = append(ports, ServicePort{Name: name, ClusterIP: vipOf(30_000 + service), Port: uint16(1 + port)})
		}
		if _, err := tracker.Services.Set(ports[0].Name.NamespacedName, ports...); err != nil {
			t.Fatal(err)
		}
	}
	if delta, _ := applyPart(t, tracker, part); len(delta.Changes) != 150 || !delta.More {
		t.Errorf("a part of Services with 50 ports has %d of 500, want 150: two Services and the oldest", len(delta.Changes))
	}
}

// However many changes come, each is applied after as many parts as are known when it comes: within a namespace the
// oldest is first, and namespaces take turns. What is taken is forgotten.
func TestAChangeWaitsForWhatIsBeforeIt(t *testing.T) {
	tracker := mustTracker(t)
	applyPart(t, tracker, Part{})
	const size, arrive, parts = 4, 6, 500
	came, most := map[string]int{}, 0
	for n := range parts {
		for i := range arrive {
			name := fmt.Sprintf("ns-%d/%d", i%3, n*arrive+i)
			if i == 0 {
				name = fmt.Sprintf("ns-%d/once", n) // a new namespace each time
			}
			setPort(t, tracker, name, n*arrive+i+1)
			came[name] = n
		}
		oldest := slices.Min(slices.Collect(maps.Values(came)))
		_, services := applyPart(t, tracker, Part{Size: size})
		for _, name := range services {
			delete(came, name)
		}
		for name, when := range came {
			if strings.HasSuffix(name, "/once") && n-when > 1 {
				t.Fatalf("part %d: %s waits since part %d, although it is alone in its namespace", n, name, when)
			}
		}
		if still := slices.Min(slices.Collect(maps.Values(came))); still == oldest {
			most++
		} else {
			most = 0
		}
		if most > arrive {
			t.Fatalf("part %d: the changes of part %d still wait", n, oldest)
		}
	}
	f := tracker.store.families[ipv4]
	if q := f.queue; len(q.all) > 2*len(f.dirty) || len(q.tenants) > 4+size || len(q.turns) > 2*len(q.tenants) || len(q.moved) != len(f.dirty) {
		t.Errorf("%d Services are dirty; stored are %d, with %d of %d namespaces and %d frontends", len(f.dirty), len(q.all), len(q.turns), len(q.tenants), len(q.moved))
	}
}

// Services that pass frontends to each other are in one part, whatever comes first. Others are not.
func TestWhoPassesFrontendsIsInOnePart(t *testing.T) {
	const node = "192.0.2.7"
	lb := func(text string) func(*ServicePort) {
		return func(p *ServicePort) { p.LoadBalancerVIPs = append(p.LoadBalancerVIPs, netip.MustParseAddr(text)) }
	}
	udp := func(p *ServicePort) { p.Name.Protocol = v1.ProtocolUDP }
	port := func(n uint16) func(*ServicePort) { return func(p *ServicePort) { p.Port = n } }
	type change func(set func(name string, clusterIP int, edits ...func(*ServicePort)))
	for name, c := range map[string]struct {
		before, after change
		want          string // the first one, and what comes with it
	}{
		"a deleted Service and its heir": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1) },
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", -1); set("b/x", 9); set("b/2", 1) }, "a/1 b/2",
		},
		"the heir is known first": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1) },
			func(set func(string, int, ...func(*ServicePort))) { set("b/2", 1); set("b/x", 9); set("a/1", 2) }, "a/1 b/2",
		},
		"a chain": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1); set("b/2", 2); set("c/3", 3) },
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 4); set("c/3", 2); set("b/2", 1) }, "a/1 b/2 c/3",
		},
		"a cycle of node ports": {
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 1, nodePort(1))
				set("b/2", 2, nodePort(2))
				set("c/3", 3, nodePort(3))
			},
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 1, nodePort(2))
				set("b/2", 2, nodePort(3))
				set("c/3", 3, nodePort(1))
			}, "a/1 b/2 c/3",
		},
		"an external IP becomes a load balancer IP": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1, externalIP("192.0.2.1")) },
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 1)
				set("a/2", 2)
				set("a/3", 3, lb("192.0.2.1"))
			}, "a/1 a/3",
		},
		"a node port becomes an external IP of the node": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1, nodePort(80)) },
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 1)
				set("a/2", 2)
				set("a/3", 3, externalIP(node))
			}, "a/1 a/3",
		},
		"a detour": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1) },
			func(set func(string, int, ...func(*ServicePort))) {
				for range 10 {
					set("a/1", 5)
					set("a/1", 2)
				}
				set("a/2", 6)
				set("a/3", 1)
			}, "a/1 a/3",
		},
		"an external IP and another port": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1, externalIP("192.0.2.1")) },
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 1)
				set("a/2", 2)
				set("a/3", 3, externalIP("192.0.2.1"), port(81))
			}, "a/1 a/3",
		},
		"an external IP that stays": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1, externalIP("192.0.2.1")) },
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 1, externalIP("192.0.2.1"), port(82))
				set("a/3", 3, externalIP("192.0.2.1"), port(81))
			}, "a/1",
		},
		"all win": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1); set("a/2", 2) },
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 1, externalIP("192.0.2.1"))
				set("a/2", 2, externalIP("192.0.2.1"))
			}, "a/1",
		},
		"all lose": {
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 1, externalIP("192.0.2.1"))
				set("a/2", 2, externalIP("192.0.2.1"))
			},
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1); set("a/2", 2) }, "a/1",
		},
		"other ports and protocols": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1) },
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 2)
				set("a/2", 1, udp)
				set("a/3", 1, port(81))
			}, "a/1",
		},
		"nothing passes": {
			func(set func(string, int, ...func(*ServicePort))) { set("a/1", 1); set("a/2", 2) },
			func(set func(string, int, ...func(*ServicePort))) {
				set("a/1", 1, nodePort(1))
				set("a/2", 2, nodePort(2))
			}, "a/1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t, func(o *Options) { o.Node.Addresses = []netip.Addr{netip.MustParseAddr(node)} })
			set := func(name string, clusterIP int, edits ...func(*ServicePort)) {
				if clusterIP < 0 {
					tracker.Services.Delete(nameIn(name))
					return
				}
				setPort(t, tracker, name, clusterIP, edits...)
			}
			c.before(set)
			applyPart(t, tracker, Part{})
			c.after(set)
			want := strings.Fields(c.want)
			f := tracker.store.families[ipv4]
			var got []string
			for _, m := range f.queue.take(nil, f.dirty[nameIn(want[0])]) {
				got = append(got, m.name.String())
			}
			if slices.Sort(got); !slices.Equal(got, want) {
				t.Errorf("with %s come %v, want %v", want[0], got, want)
			}
		})
	}
}

// TestWhoClaimsAFrontendIsInParts: if many win one frontend, or all lose it, parts keep their size. What is stored of the
// frontend does not grow with the changes.
func TestWhoClaimsAFrontendIsInParts(t *testing.T) {
	const services, size = 1000, 10
	tracker := mustTracker(t)
	f := tracker.store.families[ipv4]
	apply := func() (more bool) {
		delta, changed := applyPart(t, tracker, Part{Size: size})
		if len(changed) > size+1 { // and the oldest
			t.Errorf("a part has %d Services, want %d at most", len(changed), size+1)
		}
		for key, p := range f.queue.moved {
			if n := len(p.won) + len(p.lost); n == 0 || n > 2*len(f.dirty) {
				t.Fatalf("%d marks are stored of %v, and %d Services are dirty", n, key, len(f.dirty))
			}
		}
		return delta.More
	}
	claim := externalIP("192.0.2.1")
	applyPart(t, tracker, Part{})
	for _, edits := range [][]func(*ServicePort){nil, {claim}, nil} {
		for i := range services {
			setPort(t, tracker, fmt.Sprintf("ns/%d", i), 1+i, edits...)
		}
		for apply() {
		}
	}
	for i := range 10 * services {
		setPort(t, tracker, fmt.Sprintf("ns/%d", i%services), 1+i%services, claim, nodePort(uint16(1+i)))
		if i%size == 0 {
			apply()
		}
	}
}

// TestAnAddressPassesToOne: if many Services with other ports win the external address of one that loses it, one of them is
// in its part.
func TestAnAddressPassesToOne(t *testing.T) {
	tracker := mustTracker(t)
	shared := externalIP("192.0.2.1")
	on := func(n int) func(*ServicePort) { return func(p *ServicePort) { p.Port = uint16(n) } }
	for i := range 20 {
		setPort(t, tracker, fmt.Sprintf("old/%d", i), 1+i, shared, on(1+i))
	}
	applyPart(t, tracker, Part{})
	for i := range 20 {
		setPort(t, tracker, fmt.Sprintf("old/%d", i), 1+i, on(1+i))
		setPort(t, tracker, fmt.Sprintf("new/%d", i), 101+i, shared, on(101+i))
	}
	for more := true; more; {
		delta, changed := applyPart(t, tracker, Part{Size: 1})
		if more = delta.More; len(changed) > 4 { // the oldest and one more, and who takes over from them
			t.Errorf("a part has %v", changed)
		}
		if claimsOf(delta.After)[frontendKey{addr: netip.MustParseAddr("192.0.2.1")}] == 0 {
			t.Fatal("nobody has the address")
		}
	}
}

// What is left stays pending: versions, times, counts and the channel say so.
func TestWhatIsLeftIsPending(t *testing.T) {
	c := newClock()
	tracker := mustTracker(t, c.option, func(o *Options) { o.Families = []v1.IPFamily{v1.IPv4Protocol} })
	applyPart(t, tracker, Part{})
	tracker.Heard(InputServices, "1")
	setSlice := func(i int, address string) {
		slice := webSlice(fmt.Sprintf("s%d", i), at(address))
		slice.Namespace, slice.Labels["kubernetes.io/service-name"], slice.Ports[0].Name = "ns", fmt.Sprint(i), new("")
		tracker.Endpoints.EndpointSliceUpdate(slice, false)
	}
	var came []time.Time
	for i := range 4 {
		came = append(came, c.tick())
		setPort(t, tracker, fmt.Sprintf("ns/%d", i), i+1)
		setSlice(i, "10.0.0.1")
	}
	tracker.Heard(InputServices, "2")
	want := func(when string, version string, since time.Time, services, slices int) {
		t.Helper()
		counts := tracker.Counts()
		if v := tracker.Applied(v1.IPv4Protocol).Services; v != version || !tracker.PendingSince(v1.IPv4Protocol).Equal(since) ||
			counts.PendingServices != services || counts.PendingEndpointSlices != slices {
			t.Errorf("%s: version %q, pending since %v, %+v; want %q, %v, %d Services and %d slices", when,
				v, tracker.PendingSince(v1.IPv4Protocol), counts, version, since, services, slices)
		}
	}
	changed := func() bool {
		select {
		case <-tracker.Changed():
			return true
		default:
			return false
		}
	}
	want("before", "1", came[0], 4, 4)
	if !changed() || changed() {
		t.Error("Changed has not one value before")
	}
	one := Part{Size: 1} // and the oldest
	err := tracker.ApplyPart(v1.IPv4Protocol, one, func(d Delta) ([]ServicePortName, error) {
		want("during the first part, which fails", "1", came[0], 4, 4)
		return nil, errTest
	})
	if !errors.Is(err, errTest) || !changed() {
		t.Errorf("ApplyPart = %v, want the error, and a value from Changed", err)
	}
	delta, services := applyPart(t, tracker, Part{Size: 1, First: []types.NamespacedName{nameIn("ns/3")}})
	if fmt.Sprint(services) != "[ns/0 ns/1 ns/2 ns/3]" || delta.More {
		t.Errorf("after a failure the part has %v, want it with what failed", services)
	}
	want("at the end", "2", time.Time{}, 0, 0)
	if changed() {
		t.Error("Changed has a value at the end")
	}

	for i := range 4 {
		came[i] = c.tick()
		setPort(t, tracker, fmt.Sprintf("ns/%d", i), i+11)
	}
	setSlice(0, "10.0.0.2")
	setSlice(3, "10.0.0.2")
	tracker.Heard(InputServices, "3")
	applyPart(t, tracker, one)
	want("after the first part", "2", came[2], 2, 1)
	tracker.Heard(InputServices, "4") // without a change
	setPort(t, tracker, "ns/0", 21)
	again := c.time
	want("after a change of what was applied", "2", came[2], 3, 1)
	setPort(t, tracker, "ns/2", 3) // as it is applied
	_, services = applyPart(t, tracker, one)
	if fmt.Sprint(services) != "[ns/3]" {
		t.Errorf("the second part has %v, want ns/3: ns/2 has changed back", services)
	}
	want("after the second part", "2", again, 1, 0)
	_ = tracker.ApplyPart(v1.IPv4Protocol, one, func(d Delta) ([]ServicePortName, error) {
		tracker.Heard(InputServices, "5")
		return []ServicePortName{d.Changes[0].Name}, nil
	})
	want("after a part that failed for its service port", "5", again, 1, 0)
	applyPart(t, tracker, one)
	want("in the end", "5", time.Time{}, 0, 0)

	setPort(t, tracker, "ns/0", 31)
	setPort(t, tracker, "ns/1", 32)
	setPort(t, tracker, "ns/2", 33)
	tracker.SetNode(Node{Name: "other"})
	if delta, services := applyPart(t, tracker, one); !delta.Full || delta.More || len(services) != 3 {
		t.Errorf("after a change of the node the part has %v, full %v, more %v, want everything", services, delta.Full, delta.More)
	}
}

// A part rebuilds and allocates what it has, whatever is left, and everything is rebuilt once.
func TestAPartCostsWhatItHas(t *testing.T) {
	const services, size = 20_000, 100
	rebuilt := 0
	tracker := mustTracker(t, func(o *Options) {
		o.Families = []v1.IPFamily{v1.IPv4Protocol}
		o.EditEndpoints = func(_ *ServicePort, list []Endpoint) []Endpoint { rebuilt++; return list }
	})
	applyPart(t, tracker, Part{})
	for i := range services {
		setPort(t, tracker, fmt.Sprintf("ns-%d/%d", i%1000, i), i+1)
	}
	var costs []uint64
	parts := 0
	for more := true; more; parts++ {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		delta, changed := applyPart(t, tracker, Part{Size: size})
		runtime.ReadMemStats(&after)
		costs = append(costs, after.TotalAlloc-before.TotalAlloc)
		if more = delta.More; more && (len(changed) < size || len(changed) > size+1) {
			t.Fatalf("part %d has %d Services, want %d and the oldest", parts, len(changed), size)
		}
	}
	if rebuilt != services {
		t.Errorf("%d Services were rebuilt, want each of %d once", rebuilt, services)
	}
	// The first one puts all into the lines of their namespaces.
	if middle, most := slices.Sorted(slices.Values(costs))[parts/2], slices.Max(costs[1:]); most > 2*middle || costs[0] > middle+64*services {
		t.Errorf("of %d parts one allocates %d bytes, and half of them at most %d: want about the same", parts, most, middle)
	}
	f := tracker.store.families[ipv4]
	if q := f.queue; len(f.dirty)+len(q.all)+len(q.turns)+len(q.tenants)+len(q.moved) != 0 {
		t.Errorf("in the end %d are dirty, and the queue has %d, %d, %d and %d", len(f.dirty), len(q.all), len(q.turns), len(q.tenants), len(q.moved))
	}
}

// claims counts the claims to frontends and to their addresses.
func claims(ports []*ServicePort, of map[frontendKey]int) {
	for _, p := range ports {
		for e := range p.entries() {
			of[frontendKey{e.addr, e.port, e.name.Protocol}]++
			of[frontendKey{addr: e.addr}]++
		}
	}
}

func claimsOf(s *State) map[frontendKey]int {
	of := map[frontendKey]int{}
	for _, p := range s.All() {
		claims([]*ServicePort{p}, of)
	}
	return of
}

// TestAnyPartsAreAsGoodAsAll: in a random history, parts add up to the State of a tracker that applies everything at
// once. A frontend that a service port has, and has in the end, has one between any two parts; and none is contested
// between two parts that is not before and in the end.
func TestAnyPartsAreAsGoodAsAll(t *testing.T) {
	histories := chance.Few(200, 600)
	for seed := range uint64(histories) {
		r := rand.New(rand.NewPCG(seed, 46))
		ipv4Only := func(o *Options) { o.Families = []v1.IPFamily{v1.IPv4Protocol} }
		parts, all := mustTracker(t, ipv4Only), mustTracker(t, ipv4Only)
		held := replica{}
		apply := func(part Part) (more bool) {
			f := parts.store.families[ipv4]
			newest := map[frontendKey]int{}
			for _, s := range f.services {
				claims(s.ports, newest)
			}
			delta, _ := applyPart(t, parts, part)
			for _, c := range delta.Changes {
				if err := held.change(c, false); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
			}
			if held.dump() != dump(delta.After) {
				t.Fatalf("seed %d: the Deltas add up to\n%s, want\n%s", seed, held.dump(), dump(delta.After))
			}
			before, after := claimsOf(delta.Before), claimsOf(delta.After)
			for key, n := range before {
				if n > 0 && newest[key] > 0 && after[key] == 0 {
					t.Fatalf("seed %d: nobody has %v between two parts", seed, key)
				}
			}
			for key, n := range after {
				if n > 1 && n > before[key] && n > newest[key] && key.port != 0 {
					t.Fatalf("seed %d: %d have %v between two parts, before %d, in the end %d", seed, n, key, before[key], newest[key])
				}
			}
			return delta.More
		}
		for range 80 {
			name := fmt.Sprintf("ns-%d/%d", r.IntN(3), r.IntN(4))
			switch r.IntN(8) {
			case 0:
				parts.Services.Delete(nameIn(name))
				all.Services.Delete(nameIn(name))
			case 1:
				apply(Part{Size: r.IntN(3)})
			case 2:
				endpoint := Endpoint{Addr: addrPort(fmt.Sprintf("10.0.0.%d:80", 1+r.IntN(4))), Ready: true}
				port := ServicePortName{NamespacedName: nameIn(name), Protocol: v1.ProtocolTCP}
				for _, tracker := range []*Tracker{parts, all} {
					if _, err := tracker.Endpoints.Set(port, endpoint); err != nil {
						t.Fatal(err)
					}
				}
			default:
				vip, number, external := 1+r.IntN(6), uint16(r.IntN(5)), fmt.Sprintf("192.0.2.%d", 1+r.IntN(5))
				port := func(p *ServicePort) { p.Port = uint16(80 + vip%2) }
				for _, tracker := range []*Tracker{parts, all} {
					setPort(t, tracker, name, vip, nodePort(number), externalIP(external), port)
				}
			}
		}
		for size := 1 + r.IntN(3); apply(Part{Size: size}); {
		}
		if want, _ := applyAll(t, all, v1.IPv4Protocol); held.dump() != dump(want) {
			t.Fatalf("seed %d: the parts add up to\n%s, want\n%s", seed, held.dump(), dump(want))
		}
	}
}
