package changetracker

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What one changed endpoint allocates is in proportion to its slice, however many endpoints the
// Service has.
func TestAFlipCostsItsSlice(t *testing.T) {
	for _, c := range []struct{ size, perSlice, limit int }{
		{5_000, 100, 60_000}, {50_000, 100, 70_000}, {5_000, 1_000, 250_000}, {50_000, 1_000, 250_000},
	} {
		flip := flipping(t, c.size, c.perSlice)
		if got := bytesOf(flip); got > c.limit {
			t.Errorf("a flip among %d endpoints in slices of %d allocates %d bytes, want at most %d", c.size, c.perSlice, got, c.limit)
		}
	}
}

// bytesOf returns what a call allocates, on average.
func bytesOf(call func()) int {
	const calls = 20
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range calls {
		call()
	}
	runtime.ReadMemStats(&after)
	return int(after.TotalAlloc-before.TotalAlloc) / calls
}

// bigService makes random slices of one Service, most of whose addresses several slices have.
type bigService struct {
	random *rand.Rand
	slices map[string]*discovery.EndpointSlice
}

func (b *bigService) endpoint() discovery.Endpoint {
	n := b.random.IntN(1500)
	e := at(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}).String(), onNode(fmt.Sprint("node-", b.random.IntN(3))))
	e.Conditions = discovery.EndpointConditions{Ready: new(b.random.IntN(3) > 0), Serving: new(b.random.IntN(3) > 0), Terminating: new(b.random.IntN(3) == 0)}
	return e
}

// change adds, changes or removes a slice, and returns it.
func (b *bigService) change() (slice *discovery.EndpointSlice, remove bool) {
	name := fmt.Sprint("web-", b.random.IntN(12))
	old := b.slices[name]
	if old != nil && b.random.IntN(12) == 0 {
		delete(b.slices, name)
		return old, true
	}
	slice = webSlice(name)
	if old == nil {
		for range b.random.IntN(300) {
			slice.Endpoints = append(slice.Endpoints, b.endpoint())
		}
	} else {
		slice = old.DeepCopy()
	}
	if b.random.IntN(10) == 0 {
		slice.CreationTimestamp = metav1.NewTime(time.Unix(int64(b.random.IntN(3)), 0))
	}
	for range b.random.IntN(4) {
		n := len(slice.Endpoints)
		switch b.random.IntN(3) {
		case 0:
			slice.Endpoints = append(slice.Endpoints, b.endpoint())
		case 1:
			if n > 0 {
				slice.Endpoints[b.random.IntN(n)] = b.endpoint()
			}
		default:
			if n > 0 {
				i := b.random.IntN(n)
				slice.Endpoints = slices.Delete(slice.Endpoints, i, i+1)
			}
		}
	}
	b.slices[name] = slice
	return slice, false
}

// A Service of a thousand endpoints in slices that overlap always has the endpoints that a new
// tracker gives it. Each Delta leads from what was applied last to that, and earlier States stay as
// they were.
func TestAHugeServiceDependsOnNoHistory(t *testing.T) {
	name := portName("http", v1.ProtocolTCP)
	for seed := range uint64(3) {
		b := &bigService{random: rand.New(rand.NewPCG(seed, 0)), slices: map[string]*discovery.EndpointSlice{}}
		indexed := func(o *Options) { o.IndexEndpoints = true }
		tracker := mustTracker(t, indexed)
		tracker.Services.Update(nil, webService())
		applied := map[netip.AddrPort]Endpoint{}
		most := 0
		type version struct {
			state *State
			want  []Endpoint
		}
		var versions []version
		for step := range 80 {
			for range 1 + b.random.IntN(3) {
				tracker.Endpoints.EndpointSliceUpdate(b.change())
			}
			if b.random.IntN(20) == 0 {
				n := b.random.IntN(1500)
				addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}), 8080)
				tracker.Override(name, addr, Override{Eject: true})
				tracker.Override(name, addr, Override{})
			}
			fresh := mustTracker(t, indexed)
			fresh.Services.Update(nil, webService())
			for _, s := range b.slices {
				fresh.Endpoints.EndpointSliceUpdate(s, false)
			}
			state, _ := applyAll(t, fresh, v1.IPv4Protocol)
			want := state.Endpoints(name)
			most = max(most, len(want))
			fails := b.random.IntN(4) == 0
			err := tracker.Apply(v1.IPv4Protocol, func(s Delta) ([]ServicePortName, error) {
				if got := s.After.Endpoints(name); !sameList(got, want) {
					t.Fatalf("seed %d, step %d: %d endpoints, want %d: %v, want %v", seed, step, len(got), len(want), got, want)
				}
				next := maps.Clone(applied)
				for i := range s.Changes {
					for _, e := range s.Changes[i].Removed {
						if was, ok := next[e.Addr]; !ok || !was.Equal(&e) {
							t.Fatalf("seed %d, step %d: removes %v, which is %v", seed, step, e, was)
						}
						delete(next, e.Addr)
					}
					for _, e := range s.Changes[i].Added {
						next[e.Addr] = e
					}
				}
				if len(next) != len(want) || slices.ContainsFunc(want, func(e Endpoint) bool { is := next[e.Addr]; return !is.Equal(&e) }) {
					t.Fatalf("seed %d, step %d: the Delta leads to %d endpoints, want %d", seed, step, len(next), len(want))
				}
				versions = append(versions, version{s.After, slices.Clone(want)})
				switch {
				case fails && step%2 == 0:
					return nil, errors.New("the data plane is away")
				case fails:
					return []ServicePortName{name}, nil
				}
				applied = next
				return nil, nil
			})
			if (err != nil) != (fails && step%2 == 0) {
				t.Fatal(err)
			}
		}
		for i, v := range versions {
			if got := v.state.Endpoints(name); !sameList(got, v.want) {
				t.Errorf("seed %d: State %d has changed", seed, i)
			}
			for n := range 20 {
				addr := netip.AddrFrom4([4]byte{10, 0, byte(n % 6), byte(n * 12)})
				found := slices.Collect(v.state.ByEndpoint(addr))
				if has := slices.ContainsFunc(v.want, func(e Endpoint) bool { return e.Addr.Addr() == addr }); (len(found) == 1) != has {
					t.Errorf("seed %d: State %d finds %v at %v, want it: %t", seed, i, found, addr, has)
				}
			}
		}
		if most < 500 {
			t.Errorf("seed %d: never more than %d endpoints", seed, most)
		}
	}
}

func sameList(a, b []Endpoint) bool {
	return slices.EqualFunc(a, b, func(x, y Endpoint) bool { return x.Equal(&y) })
}
