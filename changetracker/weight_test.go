package changetracker

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// A change of the weight is a change of the endpoint, except between 0 and 1.
func TestWeightIsAField(t *testing.T) {
	for _, c := range []struct {
		from, to uint16
		want     []string
	}{
		{0, 0, nil},
		{0, 1, nil},
		{1, 0, nil},
		{2, 2, nil},
		{0, 2, []string{"default/web:http 10.96.0.10:80/TCP>10.96.0.10:80/TCP -10.0.0.1:8080 +10.0.0.1:8080 weight=2"}},
		{65535, 1, []string{"default/web:http 10.96.0.10:80/TCP>10.96.0.10:80/TCP -10.0.0.1:8080 weight=65535 +10.0.0.1:8080"}},
	} {
		var weight uint16
		tracker := mustTracker(t, func(o *Options) {
			o.DecorateEndpoint = func(e *Endpoint, _ *discovery.Endpoint, _ *discovery.EndpointSlice) { e.Weight = weight }
		})
		bySlice := func() bool { return tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false) }
		byHand := func() bool {
			changed, err := tracker.Endpoints.Set(http, Endpoint{Addr: addrPort("10.0.0.1:8080"), Ready: true, Serving: true, Weight: weight})
			if err != nil {
				t.Fatal(err)
			}
			return changed
		}
		tracker.Services.Update(nil, webService())
		for name, give := range map[string]func() bool{"by slice": bySlice, "by hand": byHand} {
			weight = c.from
			give()
			applyAll(t, tracker, v1.IPv4Protocol)
			weight = c.to
			if got, want := give(), c.want != nil; got != want {
				t.Errorf("%s, from %d to %d: changed = %v, want %v", name, c.from, c.to, got, want)
			}
			_, delta := applyAll(t, tracker, v1.IPv4Protocol)
			wantOutline(t, delta, c.want...)
			tracker.Endpoints.EndpointSliceUpdate(webSlice("a"), false)
			if _, err := tracker.Endpoints.Set(http); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// The weight is that of the record that counts; of two records in one slice that differ
// in nothing else it is the greater one, in any order.
func TestWeightComesWithTheRecordThatCounts(t *testing.T) {
	weights := map[string]uint16{"10": 10, "20": 20}
	for name, c := range map[string]struct {
		slices []*discovery.EndpointSlice
		want   uint16
	}{
		"the ready one of two slices": {[]*discovery.EndpointSlice{
			webSlice("a", at("10.0.0.1", inZone("10"))), webSlice("b", at("10.0.0.1", conditions(false, true, false), inZone("20"))),
		}, 10},
		"the newer slice": {[]*discovery.EndpointSlice{
			created(webSlice("a", at("10.0.0.1", inZone("20"))), 1), created(webSlice("b", at("10.0.0.1", inZone("10"))), 2),
		}, 10},
		"the ready one of one slice": {[]*discovery.EndpointSlice{
			webSlice("a", at("10.0.0.1", conditions(false, true, false), inZone("20")), at("10.0.0.1", inZone("10"))),
		}, 10},
		"the greater one of one slice": {[]*discovery.EndpointSlice{
			webSlice("a", at("10.0.0.1", inZone("20")), at("10.0.0.1", inZone("10"))),
		}, 20},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 {
				tracker := mustEndpointTracker(t, func(o *Options) {
					o.DecorateEndpoint = func(e *Endpoint, _ *discovery.Endpoint, _ *discovery.EndpointSlice) { e.Weight = weights[e.Zone] }
				})
				for _, s := range c.slices {
					tracker.Endpoints.EndpointSliceUpdate(s, false)
					slices.Reverse(s.Endpoints)
				}
				if got := endpointsOf(t, tracker, v1.IPv4Protocol, http); len(got) != 1 || got[0].Weight != c.want {
					t.Errorf("endpoints = %v, want one of weight %d", addrs(got), c.want)
				}
				slices.Reverse(c.slices)
			}
		})
	}
}
