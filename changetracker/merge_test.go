package changetracker

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// EPS-18, and EPS-20 as fixed here: in order of number, not of text.
func TestSlicesAreMergedInNumericalOrder(t *testing.T) {
	tracker := mustEndpointTracker(t)
	b := webSlice("b", at("10.0.0.10"), at("10.0.0.9"))
	b.Ports = append(b.Ports, endpointPort("dns", v1.ProtocolUDP, 53))
	tracker.Endpoints.EndpointSliceUpdate(b, false)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.100"), at("10.0.0.1")), false)
	got := addrs(endpointsOf(t, tracker, v1.IPv4Protocol, http))
	want := []string{"10.0.0.1:8080", "10.0.0.9:8080", "10.0.0.10:8080", "10.0.0.100:8080"}
	if !slices.Equal(got, want) {
		t.Errorf("endpoints = %v, want %v", got, want)
	}
	got = addrs(endpointsOf(t, tracker, v1.IPv4Protocol, portName("dns", v1.ProtocolUDP)))
	if want = []string{"10.0.0.9:53", "10.0.0.10:53"}; !slices.Equal(got, want) {
		t.Errorf("endpoints of dns = %v, want %v", got, want)
	}
}

// EPS-19 and W-04: which record of one address counts does not depend on the order of
// events.
func TestDuplicateThatCountsIsAlwaysTheSame(t *testing.T) {
	type rec struct {
		ready, serving, terminating bool
		node                        string
		created                     int64
		slice                       string
	}
	for name, c := range map[string]struct{ winner, loser rec }{
		"ready beats not ready":      {rec{ready: true, serving: true, slice: "b"}, rec{created: 9, slice: "a"}},
		"ready beats draining":       {rec{ready: true, slice: "b"}, rec{serving: true, terminating: true, created: 9, slice: "a"}},
		"starting beats draining":    {rec{serving: true, slice: "b"}, rec{serving: true, terminating: true, created: 9, slice: "a"}},
		"EPS-19 staying beats going": {rec{ready: true, slice: "b"}, rec{ready: true, terminating: true, created: 9, slice: "a"}},
		"EPS-19 of two not ready":    {rec{slice: "b"}, rec{terminating: true, created: 9, slice: "a"}},
		"then serving":               {rec{ready: true, serving: true, slice: "b"}, rec{ready: true, created: 9, slice: "a"}},
		"then the newest slice":      {rec{ready: true, created: 9, slice: "b"}, rec{ready: true, created: 8, slice: "a"}},
		"then the slice's name":      {rec{ready: true, created: 8, slice: "a"}, rec{ready: true, created: 8, slice: "b"}},
		"within one slice": {
			rec{ready: true, slice: "a"}, rec{serving: true, terminating: true, slice: "a"},
		},
		"within one slice, alike": {rec{ready: true, slice: "a", node: "n1"}, rec{ready: true, slice: "a", node: "n2"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, order := range [][]rec{{c.winner, c.loser}, {c.loser, c.winner}} {
				tracker, bySlice := mustEndpointTracker(t), map[string]*discovery.EndpointSlice{}
				for _, r := range order {
					node := "of-" + r.slice
					if r.node != "" {
						node = r.node
					}
					s := bySlice[r.slice]
					if s == nil {
						s = created(webSlice(r.slice), r.created)
						bySlice[r.slice] = s
					}
					s.Endpoints = append(s.Endpoints,
						at("10.0.0.1", conditions(r.ready, r.serving, r.terminating), onNode(node)))
					tracker.Endpoints.EndpointSliceUpdate(s, false)
				}
				got := endpointsOf(t, tracker, v1.IPv4Protocol, http)
				want := Endpoint{
					Addr: addrPort("10.0.0.1:8080"), Ready: c.winner.ready, Serving: c.winner.serving,
					Terminating: c.winner.terminating, Node: "of-" + c.winner.slice,
				}
				if c.winner.node != "" {
					want.Node = c.winner.node
				}
				if len(got) != 1 || !got[0].Equal(&want) {
					t.Errorf("endpoints = %+v, want %+v", got, want)
				}
			}
		})
	}
}

// Of two pods with one address, the terminating one had it before (k/k#135593).
func TestAReusedAddressIsThatOfThePodThatStays(t *testing.T) {
	value := func(ready, serving, terminating bool) int {
		return 4*count(!terminating) + 2*count(ready) + count(serving)
	}
	for pair := range 64 {
		bit := func(i int) bool { return pair>>i&1 == 1 }
		for _, slicesOf := range [][2]string{{"a", "b"}, {"b", "a"}, {"a", "a"}} {
			tracker, one := mustEndpointTracker(t), webSlice(slicesOf[0], at("10.0.0.1", conditions(bit(0), bit(1), bit(2))))
			other := webSlice(slicesOf[1], at("10.0.0.1", conditions(bit(3), bit(4), bit(5))))
			if slicesOf[0] == slicesOf[1] {
				one.Endpoints = append(one.Endpoints, other.Endpoints...)
			} else {
				tracker.Endpoints.EndpointSliceUpdate(other, false)
			}
			tracker.Endpoints.EndpointSliceUpdate(one, false)
			want := max(value(bit(0), bit(1), bit(2)), value(bit(3), bit(4), bit(5)))
			got := endpointsOf(t, tracker, v1.IPv4Protocol, http)
			if len(got) != 1 || value(got[0].Ready, got[0].Serving, got[0].Terminating) != want {
				t.Errorf("of two with ready, serving, terminating = %t and %t, in slices %v: %v",
					[]bool{bit(0), bit(1), bit(2)}, []bool{bit(3), bit(4), bit(5)}, slicesOf, addrs(got))
			}
		}
	}
}

// A change of a record that does not count is no change. The record is used when the one
// that counts is deleted.
func TestDuplicateThatDoesNotCountIsNoChange(t *testing.T) {
	tracker := mustEndpointTracker(t)
	up := webSlice("up", at("10.0.0.1"))
	tracker.Endpoints.EndpointSliceUpdate(up, false)
	applyAll(t, tracker, v1.IPv4Protocol)
	for _, serving := range []bool{true, false} {
		down := webSlice("down", at("10.0.0.1", conditions(false, serving, true)))
		if tracker.Endpoints.EndpointSliceUpdate(down, false) {
			t.Errorf("changed = true for serving = %v, want false", serving)
		}
	}
	if !tracker.Endpoints.EndpointSliceUpdate(up, true) {
		t.Error("removing the record that counts: changed = false, want true")
	}
	_, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http ->- -10.0.0.1:8080 +10.0.0.1:8080 notready terminating serving=false")
}

// W-04: a slice that was deleted and created again between two events is a newer one.
func TestNewerSliceWinsAlsoWhenOnlyItsAgeChanged(t *testing.T) {
	tracker := mustEndpointTracker(t)
	tracker.Endpoints.EndpointSliceUpdate(created(webSlice("a", at("10.0.0.1", onNode("of-a"))), 5), false)
	tracker.Endpoints.EndpointSliceUpdate(created(webSlice("b", at("10.0.0.1", onNode("of-b"))), 4), false)
	applyAll(t, tracker, v1.IPv4Protocol)
	if !tracker.Endpoints.EndpointSliceUpdate(created(webSlice("b", at("10.0.0.1", onNode("of-b"))), 6), false) {
		t.Error("changed = false, want true")
	}
	if got := endpointsOf(t, tracker, v1.IPv4Protocol, http)[0].Node; got != "of-b" {
		t.Errorf("node = %q, want that of the newer slice", got)
	}
}

// Many changes of one port between two Applies are no longer stored one by one. No order
// of few and many may lose one.
func TestManyAddressesAndFewBetweenTwoApplies(t *testing.T) {
	many := func(name string, third int) *discovery.EndpointSlice {
		s := webSlice(name)
		for i := range maxTouched + 1 {
			s.Endpoints = append(s.Endpoints, at(fmt.Sprintf("10.%d.%d.%d", third, i/250, i%250+1)))
		}
		return s
	}
	few := func(name, address string) *discovery.EndpointSlice { return webSlice(name, at(address)) }
	for name, c := range map[string]struct {
		slices []*discovery.EndpointSlice
		want   int
	}{
		"many, few": {[]*discovery.EndpointSlice{many("b", 2), few("c", "10.3.0.1")}, maxTouched + 3},
		"many, few, few": {
			[]*discovery.EndpointSlice{many("b", 2), few("c", "10.3.0.1"), few("d", "10.3.0.2")}, maxTouched + 4,
		},
		"few, many": {[]*discovery.EndpointSlice{few("c", "10.3.0.1"), many("b", 2)}, maxTouched + 3},
	} {
		tracker := mustEndpointTracker(t)
		tracker.Endpoints.EndpointSliceUpdate(few("a", "10.0.0.1"), false)
		applyAll(t, tracker, v1.IPv4Protocol)
		for _, s := range c.slices {
			tracker.Endpoints.EndpointSliceUpdate(s, false)
		}
		state, delta := applyAll(t, tracker, v1.IPv4Protocol)
		if got := len(state.Endpoints(http)); got != c.want {
			t.Errorf("%s: endpoints = %d, want %d", name, got, c.want)
		}
		if got := len(delta.Changes[0].Added); got != c.want-1 {
			t.Errorf("%s: added = %d, want %d", name, got, c.want-1)
		}
	}
}

// The merged list is built from the previous one, here in many steps with large slices.
// The oracle merges from scratch.
func TestMergingInStepsIsLikeMergingAtOnce(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	tracker := mustTracker(t)
	last := map[string]*discovery.EndpointSlice{}
	for step := range 300 {
		name := fmt.Sprintf("s%d", r.IntN(6))
		s := last[name]
		if s == nil || r.IntN(20) == 0 {
			s = created(webSlice(name), int64(r.IntN(2)))
			for range r.IntN(400) {
				s.Endpoints = append(s.Endpoints, at(fmt.Sprintf("10.0.%d.%d", r.IntN(4), r.IntN(256))))
			}
		} else {
			s = s.DeepCopy()
			for range min(len(s.Endpoints), r.IntN(4)) {
				s.Endpoints[r.IntN(len(s.Endpoints))].Conditions = discovery.EndpointConditions{
					Ready: new(r.IntN(2) == 0), Terminating: new(r.IntN(2) == 0),
				}
			}
		}
		last[name] = s
		remove := r.IntN(15) == 0
		if remove {
			delete(last, name)
		}
		tracker.Endpoints.EndpointSliceUpdate(s, remove)
		if step%3 != 0 {
			continue
		}
		state, _ := applyAll(t, tracker, v1.IPv4Protocol)
		fresh := mustTracker(t)
		for _, s := range last {
			fresh.Endpoints.EndpointSliceUpdate(s, false)
		}
		want, _ := applyAll(t, fresh, v1.IPv4Protocol)
		if dump(state) != dump(want) {
			t.Fatalf("step %d: endpoints differ from those of a fresh tracker", step)
		}
	}
}

// sizes returns how much a tracker stores, for comparison with a fresh one.
func sizes(t *Tracker) string {
	s := t.store
	text := fmt.Sprintf("slices %d, problems %d", len(s.owners), len(s.problems.byObject))
	for _, f := range s.families {
		if f != nil {
			text += fmt.Sprintf("; sources %d, dirty %d, pending %d, triggers %d, services %d, index %d, ports %d",
				len(f.services), len(f.dirty), len(f.pending), len(f.triggers), f.current.services.Len(),
				f.current.index.Len(), f.current.servicePorts)
		}
	}
	return text
}
