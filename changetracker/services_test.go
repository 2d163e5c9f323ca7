package changetracker_test

import (
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestEndpointsAloneTellWhichNodesHaveThem: a controller of load balancers needs no Services.
func TestEndpointsAloneTellWhichNodesHaveThem(t *testing.T) {
	tracker, err := changetracker.NewEndpointChangeTracker(changetracker.Options{})
	if err != nil {
		t.Fatal(err)
	}
	tracker.EndpointSliceUpdate(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint("10.1.0.1", proxiertest.OnNode("b")), proxiertest.Endpoint("10.1.0.2", proxiertest.OnNode("a")),
		proxiertest.Endpoint("10.1.0.3", proxiertest.OnNode("a")), proxiertest.Endpoint("10.1.0.4", proxiertest.OnNode("c"), proxiertest.Terminating()),
		proxiertest.Endpoint("10.1.0.5")), false)
	_ = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		web := types.NamespacedName{Namespace: "shop", Name: "web"}
		s := delta.After
		if got := slices.Collect(s.Services()); !slices.Equal(got, []types.NamespacedName{web}) {
			t.Errorf("Services = %v, want web", got)
		}
		if got := s.Nodes(web); !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("Nodes = %v, want a and b, where endpoints are ready", got)
		}
		ports := s.ServicePorts(web)
		if len(ports) != 1 {
			t.Fatalf("ServicePorts = %v, want one", ports)
		}
		for _, want := range s.Endpoints(ports[0]) {
			if got, ok := s.Endpoint(ports[0], want.Addr); !ok || !got.Equal(&want) {
				t.Errorf("Endpoint of %v = %+v, %t, want %+v", want.Addr, got, ok, want)
			}
		}
		if got, ok := s.Endpoint(ports[0], netip.MustParseAddrPort("10.1.0.2:8081")); ok {
			t.Errorf("Endpoint of another port = %+v, want none", got)
		}
		return nil, nil
	})
}

// Without Services, one ready endpoint of a group is enough.
func TestEndpointsAloneHaveGroups(t *testing.T) {
	tracker, err := changetracker.NewEndpointChangeTracker(changetracker.Options{})
	if err != nil {
		t.Fatal(err)
	}
	web := types.NamespacedName{Namespace: "shop", Name: "web"}
	name := changetracker.ServicePortName{NamespacedName: web, Port: "http", Protocol: v1.ProtocolTCP}
	if _, err := tracker.Set(name, changetracker.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.1:80"), Node: "a", Priority: 1, Ready: true},
		changetracker.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.2:80"), Node: "b", Priority: 2, Ready: true}); err != nil {
		t.Fatal(err)
	}
	_ = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		if got := delta.After.Nodes(web); !slices.Equal(got, []string{"a"}) {
			t.Errorf("Nodes = %v, want a", got)
		}
		return nil, nil
	})
}
