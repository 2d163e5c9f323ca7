package proxiertest_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestServiceOptionsFillInWhatTheAPIServerWould(t *testing.T) {
	dual := proxiertest.Service("ns", "web", proxiertest.ClusterIPs("fd00::1", "10.96.0.1"))
	if got, want := dual.Spec.IPFamilies, []v1.IPFamily{v1.IPv6Protocol, v1.IPv4Protocol}; !cmp.Equal(got, want) {
		t.Errorf("families = %v, want %v", got, want)
	}
	if got := dual.Spec.ClusterIP; got != "fd00::1" {
		t.Errorf("clusterIP = %q, want the first of clusterIPs", got)
	}
	for want, opts := range map[v1.ServiceType][]proxiertest.ServiceOption{
		v1.ServiceTypeClusterIP:    {proxiertest.Port("a", v1.ProtocolTCP, 80)},
		v1.ServiceTypeNodePort:     {proxiertest.NodePort("a", v1.ProtocolTCP, 80, 30080)},
		v1.ServiceTypeExternalName: {proxiertest.ExternalName("example.com")},
		v1.ServiceTypeLoadBalancer: {proxiertest.LoadBalancer("203.0.113.1"), proxiertest.NodePort("a", v1.ProtocolTCP, 80, 30080)},
	} {
		if got := proxiertest.Service("ns", "web", opts...).Spec.Type; got != want {
			t.Errorf("type = %s, want %s", got, want)
		}
	}
	sticky := proxiertest.Service("ns", "web", proxiertest.ClientAffinity(90*time.Second))
	if got := *sticky.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds; got != 90 {
		t.Errorf("affinity timeout = %d s, want 90", got)
	}
}

func TestEndpointOptionsSetAllThreeConditions(t *testing.T) {
	slice := proxiertest.Slice("ns", "web", discovery.AddressTypeIPv6,
		proxiertest.Endpoint("fd00::1"),
		proxiertest.Endpoint("fd00::2", proxiertest.Terminating(), proxiertest.OnNode("n"), proxiertest.InZone("z")),
		proxiertest.Endpoint("fd00::3", proxiertest.NotServing()))
	if slice.Name != "web-ipv6" || slice.Labels[discovery.LabelServiceName] != "web" {
		t.Errorf("slice %s of %q, want web-ipv6 of web", slice.Name, slice.Labels[discovery.LabelServiceName])
	}
	want := [][3]bool{{true, true, false}, {false, true, true}, {false, false, false}}
	for i, e := range slice.Endpoints {
		got := [3]bool{*e.Conditions.Ready, *e.Conditions.Serving, *e.Conditions.Terminating}
		if got != want[i] {
			t.Errorf("%s: ready, serving, terminating = %v, want %v", e.Addresses, got, want[i])
		}
	}
	if e := slice.Endpoints[1]; *e.NodeName != "n" || *e.Zone != "z" {
		t.Errorf("endpoint on node %s in zone %s, want n and z", *e.NodeName, *e.Zone)
	}
}
