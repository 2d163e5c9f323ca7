package changetracker

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/chance"
)

// churn delivers one random event of one of a number of Services, and records it in
// last.
func churn(r *rand.Rand, tracker *Tracker, services int, last map[string]any) {
	n := r.IntN(services)
	name, slice := fmt.Sprintf("svc-%d", n), fmt.Sprintf("slice-%d-%d", n, r.IntN(3))
	switch r.IntN(8) {
	case 0, 1:
		s := randomService(r, name)
		tracker.Services.Update(nil, s)
		last[name] = s
	case 2:
		tracker.Services.Delete(types.NamespacedName{Namespace: web.Namespace, Name: name})
		delete(last, name)
	case 3:
		tracker.Endpoints.EndpointSliceUpdate(randomSlice(r, slice), true)
		delete(last, slice)
	default:
		s := randomSlice(r, slice)
		s.Labels[discovery.LabelServiceName] = fmt.Sprintf("svc-%d", (n+r.IntN(2))%services)
		s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: "2100-01-01T00:00:00Z"}
		tracker.Endpoints.EndpointSliceUpdate(s, false)
		last[slice] = s
	}
}

func indexed(o *Options) { o.IndexEndpoints = true }

func replayLast(tracker *Tracker, last map[string]any) {
	for _, object := range last {
		switch o := object.(type) {
		case *v1.Service:
			tracker.Services.Update(nil, o)
		case *discovery.EndpointSlice:
			tracker.Endpoints.EndpointSliceUpdate(o, false)
		}
	}
}

func TestNothingIsLeftOfWhatIsGone(t *testing.T) {
	events := chance.Few(100_000, 200_000)
	r := rand.New(rand.NewPCG(11, 12))
	tracker, last := mustTracker(t, indexed), map[string]any{}
	for i := range events {
		churn(r, tracker, 200, last)
		if i%100 != 0 {
			continue
		}
		_ = tracker.Apply(pick(r, bothFamilies()...), func(d Delta) ([]ServicePortName, error) {
			switch {
			case r.IntN(3) == 0:
				return nil, errTest
			case r.IntN(3) == 0 && len(d.Changes) > 0:
				return []ServicePortName{d.Changes[0].Name}, nil
			}
			return nil, nil
		})
	}
	fresh := mustTracker(t, indexed)
	replayLast(fresh, last)
	for _, family := range bothFamilies() {
		got, _ := applyAll(t, tracker, family)
		want, _ := applyAll(t, fresh, family)
		if dump(got) != dump(want) {
			t.Errorf("%s: the State differs from that of a fresh tracker", family)
		}
	}
	if got, want := sizes(tracker), sizes(fresh); got != want {
		t.Errorf("sizes after %d events = %s\nof a fresh tracker %s", events, got, want)
	}
	for name := range last {
		tracker.Services.Delete(types.NamespacedName{Namespace: web.Namespace, Name: name})
		gone := webSlice(name)
		tracker.Endpoints.EndpointSliceUpdate(gone, true)
	}
	for _, family := range bothFamilies() {
		applyAll(t, tracker, family)
	}
	if got, want := sizes(tracker), sizes(mustTracker(t)); got != want {
		t.Errorf("sizes when all is gone = %s\nof an empty tracker %s", got, want)
	}
}

// For the race detector. In the end the State must be right, too.
func TestUpdatesAndAppliesAtTheSameTime(t *testing.T) {
	const writers, events = 4, 500
	heavy := func(o *Options) {
		o.EditEndpoints = func(_ *ServicePort, list []Endpoint) []Endpoint {
			for i := range list {
				list[i].Weight += 7
			}
			return list
		}
	}
	tracker := mustTracker(t, indexed, heavy)
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		last = map[string]any{}
		done = make(chan struct{})
		// running counts the Applies of each family.
		running perFamily[atomic.Int32]
	)
	for w := range writers {
		wg.Go(func() {
			r, own := rand.New(rand.NewPCG(uint64(w), 1)), map[string]any{}
			for range events {
				n := r.IntN(5)
				name := fmt.Sprintf("w%d-%d", w, n) // each writer has Services of its own
				s := randomService(r, name)
				tracker.Services.Update(nil, s)
				slice := randomSlice(r, name)
				slice.Labels[discovery.LabelServiceName] = name
				tracker.Endpoints.EndpointSliceUpdate(slice, false)
				port := ServicePortName{types.NamespacedName{Namespace: web.Namespace, Name: name}, "http", v1.ProtocolTCP}
				tracker.Override(port, addrPort("10.0.0.1:8080"), Override{Eject: true, Scale: uint16(n)})
				tracker.Refresh(port)
				tracker.Override(port, addrPort("10.0.0.1:8080"), Override{})
				own["service "+name], own["slice "+name] = s, slice
			}
			mu.Lock()
			defer mu.Unlock()
			maps.Copy(last, own)
		})
	}
	var appliers sync.WaitGroup
	for i := range 3 {
		appliers.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-done:
					return
				default:
				}
				family := (i + n) % 2
				var after *State
				err := tracker.Apply(bothFamilies()[family], func(d Delta) ([]ServicePortName, error) {
					s := d.After
					after = s
					if running[family].Add(1) != 1 {
						t.Error("two Applies of one family at the same time")
					}
					defer running[family].Add(-1)
					_ = dump(s)
					for _, c := range d.Changes {
						_ = s.Endpoints(c.Name)
					}
					if n%3 == 0 {
						return nil, errTest
					}
					return nil, nil
				})
				if err != nil && !errors.Is(err, errTest) {
					t.Error(err)
				}
				if err := checkState(after); err != nil { // while others go on
					t.Error(err)
				}
				tracker.SetNode(Node{Name: fmt.Sprintf("n%d", n%2)})
				_ = tracker.Problems()
				_ = tracker.ProblemCounts()
				_ = tracker.PendingSince(v1.IPv4Protocol)
			}
		})
	}
	wg.Wait()
	close(done)
	appliers.Wait()
	tracker.SetNode(Node{Name: "n0"})
	fresh := mustTracker(t, func(o *Options) { o.Node = Node{Name: "n0"} }, heavy)
	replayLast(fresh, last)
	for _, family := range bothFamilies() {
		got, _ := applyAll(t, tracker, family)
		want, _ := applyAll(t, fresh, family)
		if dump(got) != dump(want) {
			t.Errorf("%s: state = %s\nwant %s", family, dump(got), dump(want))
		}
	}
}
