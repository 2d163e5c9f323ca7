package changetracker

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func benchService(i int) *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("svc-%d", i)},
		Spec: v1.ServiceSpec{
			Type:       v1.ServiceTypeClusterIP,
			ClusterIP:  fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&255, i&255),
			ClusterIPs: []string{fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&255, i&255)},
			IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports:      []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}},
		},
	}
}

// benchSlice has count endpoints from number first on.
func benchSlice(service, slice, first, count int) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: fmt.Sprintf("svc-%d-%d", service, slice),
			Labels: map[string]string{discovery.LabelServiceName: fmt.Sprintf("svc-%d", service)},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports: []discovery.EndpointPort{{
			Name: new("http"), Protocol: new(v1.ProtocolTCP), Port: new(int32(8080)),
		}},
	}
	for i := first; i < first+count; i++ {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", i>>16&255, i>>8&255, i&255)},
			Conditions: discovery.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			NodeName:   new(fmt.Sprintf("node-%d", i%100)),
			Zone:       new("zone-a"),
		})
	}
	return s
}

func benchTracker(tb testing.TB) *Tracker {
	tb.Helper()
	t, err := New(Options{Node: Node{Name: "node-1", Zone: "zone-a"}})
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

func benchApply(tb testing.TB, t *Tracker, wantChanges int) {
	tb.Helper()
	err := t.Apply(v1.IPv4Protocol, func(d Delta) ([]ServicePortName, error) {
		if len(d.Changes) != wantChanges {
			return nil, fmt.Errorf("changes = %d, want %d", len(d.Changes), wantChanges)
		}
		return nil, nil
	})
	if err != nil {
		tb.Fatal(err)
	}
}

// flipping returns a tracker with a Service in slices of one size, and what flips the readiness of
// one of its endpoints and applies that.
func flipping(tb testing.TB, size, perSlice int) (flip func()) {
	tb.Helper()
	tracker := benchTracker(tb)
	tracker.Services.Update(nil, benchService(0))
	for first := 0; first < size; first += perSlice {
		tracker.Endpoints.EndpointSliceUpdate(benchSlice(0, first, first, perSlice), false)
	}
	benchApply(tb, tracker, 1)
	slice := benchSlice(0, 0, 0, perSlice)
	return func() {
		*slice.Endpoints[50].Conditions.Ready = !*slice.Endpoints[50].Conditions.Ready
		tracker.Endpoints.EndpointSliceUpdate(slice, false)
		benchApply(tb, tracker, 1)
	}
}

// EndpointSliceUpdate and Apply for one endpoint whose readiness flips. Slices have 100 endpoints
// unless the name says otherwise. Budget: 0.1 ms and 60 kB at 5,000 (kube-proxy: 33 ms and 60,292
// allocations).
func BenchmarkFlipOneEndpoint(b *testing.B) {
	for _, c := range []struct {
		name           string
		size, perSlice int
	}{
		{"E=100", 100, 100},
		{"E=1000", 1_000, 100},
		{"E=5000", 5_000, 100},
		{"E=50000", 50_000, 100},
		{"E=5000/slices=1000", 5_000, 1_000},
		{"E=50000/slices=1000", 50_000, 1_000},
	} {
		b.Run(c.name, func(b *testing.B) {
			flip := flipping(b, c.size, c.perSlice)
			b.ReportAllocs()
			for b.Loop() {
				flip()
			}
		})
	}
}

// From the first event to the first Apply. Budget: 80 ms and 120,000
// allocations (kube-proxy: 250 ms and 455,195).
func BenchmarkInitialLoad(b *testing.B) {
	const services, endpoints = 5_000, 10
	b.Run(fmt.Sprintf("N=%d/E=%d", services, endpoints), func(b *testing.B) {
		var apis []*v1.Service
		var slices []*discovery.EndpointSlice
		for i := range services {
			apis = append(apis, benchService(i))
			slices = append(slices, benchSlice(i, 0, i*endpoints, endpoints))
		}
		b.ReportAllocs()
		for b.Loop() {
			t := benchTracker(b)
			for i := range services {
				t.Services.Update(nil, apis[i])
				t.Endpoints.EndpointSliceUpdate(slices[i], false)
			}
			benchApply(b, t, services)
		}
	})
}

// An informer's resync. Budget: no allocation (kube-proxy: 0.38 ms and 19).
func BenchmarkRedeliverIdenticalSlice(b *testing.B) {
	t := benchTracker(b)
	slice := benchSlice(0, 0, 0, 100)
	t.Endpoints.EndpointSliceUpdate(slice, false)
	again := slice.DeepCopy()
	b.ReportAllocs()
	for b.Loop() {
		if t.Endpoints.EndpointSliceUpdate(again, false) {
			b.Fatal("an identical slice counts as a change")
		}
	}
}

// One endpoint flips in one of many Services. Budget: about the same at either
// size.
func BenchmarkOneChangeAmong(b *testing.B) {
	for _, services := range []int{1_000, 30_000} {
		b.Run(fmt.Sprintf("N=%d/E=2", services), func(b *testing.B) {
			t := benchTracker(b)
			var slices []*discovery.EndpointSlice
			for i := range services {
				t.Services.Update(nil, benchService(i))
				slices = append(slices, benchSlice(i, 0, i*2, 2))
				t.Endpoints.EndpointSliceUpdate(slices[i], false)
			}
			benchApply(b, t, services)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				slice := slices[i%64]
				*slice.Endpoints[0].Conditions.Ready = !*slice.Endpoints[0].Conditions.Ready
				t.Endpoints.EndpointSliceUpdate(slice, false)
				benchApply(b, t, 1)
			}
		})
	}
}
