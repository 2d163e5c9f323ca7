package changetracker

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// A slice that fits no port is found, whether the Service or the slice came first. A slice that fits is not
// reported, nor is a slice without a Service.
func TestSlicesThatFitNoPortAreFound(t *testing.T) {
	slice := func(name, port string, protocol v1.Protocol) *discovery.EndpointSlice {
		s := webSlice(name, discovery.Endpoint{Addresses: []string{"10.0.0.1"}}, discovery.Endpoint{Addresses: []string{"10.0.0.2"}})
		s.Ports[0].Name, s.Ports[0].Protocol = &port, &protocol
		return s
	}
	misspelt, fits, datagrams := slice("misspelt", "htpp", v1.ProtocolTCP), slice("fits", "http", v1.ProtocolTCP), slice("datagrams", "http", v1.ProtocolUDP)
	tracker := mustTracker(t)
	for _, s := range []*discovery.EndpointSlice{misspelt, fits} {
		tracker.Endpoints.EndpointSliceUpdate(s, false)
	}
	expect := func(when, want string) {
		t.Helper()
		if got := fmt.Sprint(tracker.Unmatched(http.NamespacedName)); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	expect("without the Service", "[]")
	tracker.Services.Update(nil, webService())
	expect("with the Service", "[{IPv4 misspelt [htpp/TCP] 2}]")
	tracker.Endpoints.EndpointSliceUpdate(datagrams, false)
	expect("with another protocol", "[{IPv4 datagrams [http/UDP] 2} {IPv4 misspelt [htpp/TCP] 2}]")
	tracker.Endpoints.EndpointSliceUpdate(misspelt, true)
	tracker.Endpoints.EndpointSliceUpdate(datagrams, true)
	expect("without them", "[]")
}
