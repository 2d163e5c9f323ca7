package changetracker

import (
	"errors"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// Each change is counted once, whatever the number of families (W-28), and is pending until it is applied: MET-06
// to MET-09.
func TestChangesAreCountedOnce(t *testing.T) {
	tracker := mustTracker(t)
	want := func(when string, want EventCounts) {
		t.Helper()
		if got := tracker.Counts(); got != want {
			t.Errorf("%s: %+v, want %+v", when, got, want)
		}
	}
	want("at first", EventCounts{})
	dual := webService(func(s *v1.Service) { s.Spec.ClusterIPs = []string{"10.96.0.10", "fd00::10"} })
	tracker.Services.Update(nil, dual)
	tracker.Services.Update(dual, dual) // no change
	tracker.Endpoints.EndpointSliceUpdate(webSlice("web-1", at("10.0.0.1")), false)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("web-1", at("10.0.0.1")), false)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("web-1", at("10.0.0.2")), false)
	want("pending", EventCounts{Services: 2, EndpointSlices: 3, PendingServices: 1, PendingEndpointSlices: 2})

	apply := func(family v1.IPFamily, during func() error) {
		t.Helper()
		_ = tracker.Apply(family, func(Delta) ([]ServicePortName, error) { return nil, during() })
	}
	apply(v1.IPv4Protocol, func() error { return errors.New("no") })
	want("after a failure", EventCounts{Services: 2, EndpointSlices: 3, PendingServices: 1, PendingEndpointSlices: 2})
	apply(v1.IPv4Protocol, func() error {
		tracker.Endpoints.EndpointSliceUpdate(webSlice("web-1", at("10.0.0.3")), false)
		return nil
	})
	want("in the other family still", EventCounts{Services: 2, EndpointSlices: 4, PendingServices: 1, PendingEndpointSlices: 1})
	apply(v1.IPv6Protocol, func() error { return nil })
	want("of what came meanwhile", EventCounts{Services: 2, EndpointSlices: 4, PendingEndpointSlices: 1})
	apply(v1.IPv4Protocol, func() error { return nil })
	want("at last", EventCounts{Services: 2, EndpointSlices: 4})

	tracker.Services.Update(dual, nil)
	_ = tracker.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) {
		return []ServicePortName{portName("http", v1.ProtocolTCP)}, nil
	})
	apply(v1.IPv6Protocol, func() error { return nil })
	want("after a refusal", EventCounts{Services: 3, EndpointSlices: 4, PendingServices: 1})
}
