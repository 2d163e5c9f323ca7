package proxier_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestATenantDoesNotReachAnotherNamespace: whatever one namespace has, a Service of another one
// means what it meant before, and what is set aside is reported with its object. What Services can
// do to the frontends of others is in TestTheOlderServiceHasTheVIP.
func TestATenantDoesNotReachAnotherNamespace(t *testing.T) {
	for what, tenant := range map[string]struct {
		service  *v1.Service
		slice    *discovery.EndpointSlice
		problems []string // values of those that are reported
		kept     []string // endpoints of its own Service
	}{
		"slice with the name of another namespace's Service": {
			slice: proxiertest.Slice("evil", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.6.6")),
		},
		"slice with the name of another namespace's slice": {
			slice: proxiertest.Slice("evil", "own", discovery.AddressTypeIPv4, proxiertest.SliceName("web-abcde"),
				proxiertest.SlicePort("", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.6.6")),
		},
		"Service of the same name": {service: mayClaim("evil", "web", 1, 80)},
		"endpoints that no pod has": {
			service: mayClaim("evil", "own", 1, 80),
			slice: proxiertest.Slice("evil", "own", discovery.AddressTypeIPv4, proxiertest.SlicePort("", v1.ProtocolTCP, 8080),
				proxiertest.Endpoint("127.0.0.1"), proxiertest.Endpoint("169.254.169.254"), proxiertest.Endpoint("224.0.0.1"),
				proxiertest.Endpoint("0.0.0.0"), proxiertest.Endpoint("10.244.6.6")),
			problems: []string{"0.0.0.0", "127.0.0.1", "169.254.169.254", "224.0.0.1"},
			kept:     []string{"10.244.6.6:8080"},
		},
		"endpoints at another Service's ClusterIP and at the node": {
			service: mayClaim("evil", "own", 1, 80),
			slice: proxiertest.Slice("evil", "own", discovery.AddressTypeIPv4, proxiertest.SlicePort("", v1.ProtocolTCP, 80),
				proxiertest.Endpoint(clusterIPOf("prodweb")), proxiertest.Endpoint(nodeIP)),
			kept: []string{clusterIPOf("prodweb") + ":80", nodeIP + ":80"},
		},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer synctest.Wait()
				defer cancel()
				victim := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "prod", Name: "web"}, Protocol: v1.ProtocolTCP}
				c := newClaimed(ctx, t, claimedNode(nodeIP), mayClaim("prod", "web", 9, 80, proxiertest.ExternalIPs(sharedVIP)))
				c.OnEndpointSliceAdd(proxiertest.Slice("prod", "web", discovery.AddressTypeIPv4, proxiertest.SliceName("web-abcde"),
					proxiertest.SlicePort("", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.1.1")))
				c.sync(t)
				before := c.engine.Services()[victim]
				if before == nil || before.Cluster.Len() != 1 || len(before.Frontends) != 2 {
					t.Fatalf("the victim is %+v, want one endpoint and two frontends", before)
				}
				if tenant.service != nil {
					c.OnServiceAdd(tenant.service)
				}
				if tenant.slice != nil {
					c.OnEndpointSliceAdd(tenant.slice)
				}
				c.sync(t)
				after := c.engine.Services()[victim]
				if !after.Cluster.Equal(before.Cluster) || !slices.EqualFunc(after.Frontends, before.Frontends, sameFrontend) {
					t.Errorf("the victim has become\n%+v, want\n%+v", after, before)
				}
				own := c.engine.Services()[changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "evil", Name: "own"}, Protocol: v1.ProtocolTCP}]
				if own != nil {
					var kept []string
					for _, e := range own.Cluster.Slice() {
						kept = append(kept, e.String())
					}
					if !slices.Equal(kept, tenant.kept) {
						t.Errorf("the tenant's own endpoints are %q, want %q", kept, tenant.kept)
					}
				}
				var values []string
				for _, p := range c.Status().Problems {
					values = append(values, p.Value)
				}
				if slices.Sort(values); !slices.Equal(values, tenant.problems) {
					t.Errorf("problems are about %q, want %q", values, tenant.problems)
				}
			})
		})
	}
}

func sameFrontend(a, b desired.Frontend) bool {
	return a.Kind == b.Kind && a.VIP == b.VIP && a.Port == b.Port && a.Action == b.Action && a.Scope == b.Scope
}

// TestConflictsOfAServicePortAreBounded: a Service of 1 MB could lack 65,536 frontends.
func TestConflictsOfAServicePortAreBounded(t *testing.T) {
	const asked = 500
	many := func(s *v1.Service) {
		for i := range asked {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("203.0.%d.%d", i>>8, i&255))
		}
	}
	p := newProxier(t, proxier.Deps{}, &fakeEngine{})
	p.OnServiceAdd(service("a", "10.96.0.1", many))
	p.OnServiceAdd(service("b", "10.96.0.2", many))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	if err := p.SyncNow(t.Context()); err != nil {
		t.Fatal(err)
	}
	counts := map[changetracker.Reason]int{}
	for _, problem := range p.Status().Problems {
		counts[problem.Reason]++
	}
	if want := (map[changetracker.Reason]int{changetracker.ReasonDuplicate: 100, changetracker.ReasonTooMany: 1}); !maps.Equal(counts, want) {
		t.Errorf("problems %v, want %v", counts, want)
	}
}
