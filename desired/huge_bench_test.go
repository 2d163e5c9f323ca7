package desired

import (
	"fmt"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// flippingHuge returns what flips an endpoint of a Service in slices of 100, from the event to the
// Update of the engine.
func flippingHuge(tb testing.TB, size int) (flip func()) {
	tb.Helper()
	node := changetracker.Node{Name: "node-1", Zone: "zone-a"}
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: node})
	if err != nil {
		tb.Fatal(err)
	}
	if _, err := tracker.Services.Set(webName.NamespacedName, changetracker.ServicePort{Name: webName, ClusterIP: netip.MustParseAddr("10.96.0.10"), Port: 80}); err != nil {
		tb.Fatal(err)
	}
	var all []*discovery.EndpointSlice
	for first := 0; first < size; first += 100 {
		s := &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: webName.Namespace, Name: fmt.Sprint("web-", first), Labels: map[string]string{discovery.LabelServiceName: webName.Name},
			},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: new(webName.Port), Protocol: new(webName.Protocol), Port: new(int32(8080))}},
		}
		for n := first; n < first+100; n++ {
			s.Endpoints = append(s.Endpoints, discovery.Endpoint{
				Addresses:  []string{netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}).String()},
				Conditions: discovery.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
				NodeName:   new(fmt.Sprint("node-", n%100)), Zone: new("zone-a"),
			})
		}
		tracker.Endpoints.EndpointSliceUpdate(s, false)
		all = append(all, s)
	}
	u := NewUpdater()
	apply := func() {
		if err := tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			update := u.Next(delta, Resolver{Node: node}, Globals{}, false)
			if len(update.Changes) != 1 {
				tb.Fatalf("%d changes, want 1", len(update.Changes))
			}
			if c := &update.Changes[0]; c.Before != nil { // as an engine does that writes differences
				added, removed := c.After.Cluster.Changes(c.Before.Cluster)
				if len(added)+len(removed) != 1 {
					tb.Errorf("%v added, %v removed, want one", added, removed)
				}
			}
			u.Done(nil)
			return nil, nil
		}); err != nil {
			tb.Error(err)
		}
	}
	apply()
	return func() {
		e := &all[0].Endpoints[50]
		*e.Conditions.Ready = !*e.Conditions.Ready
		tracker.Endpoints.EndpointSliceUpdate(all[0], false)
		apply()
	}
}

// BenchmarkHugeService measures the change of one endpoint of a Service, from the event to the engine's Update.
func BenchmarkHugeService(b *testing.B) {
	for _, size := range []int{100, 5_000, 50_000} {
		b.Run(fmt.Sprintf("E=%d", size), func(b *testing.B) {
			flip := flippingHuge(b, size)
			flip() // the first one goes through all
			b.ReportAllocs()
			for b.Loop() {
				flip()
			}
		})
	}
}
