package proxier_test

import (
	"errors"
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/proportion"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestASyncIsInProportionToTheService(t *testing.T) {
	ports := func(n int) func(*v1.Service) {
		return func(s *v1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeLoadBalancer, v1.ServiceExternalTrafficPolicyLocal
			s.Spec.HealthCheckNodePort = 31_000
			s.Spec.Ports = nil
			for i := range n {
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint(i), Port: int32(i + 1)})
			}
		}
	}
	vips := func(n int) func(*v1.Service) {
		return func(s *v1.Service) {
			for i := range n {
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("203.%d.%d.1", i>>8, i&255))
			}
		}
	}
	// prepare makes the changes before the measured sync.
	for name, prepare := range map[string]func(p *proxier.Proxier, e *fakeEngine, n int){
		"many ports": func(p *proxier.Proxier, _ *fakeEngine, n int) {
			p.OnServiceAdd(service("a", "10.96.0.1", ports(n)))
		},
		"many ports that fail": func(p *proxier.Proxier, e *fakeEngine, n int) {
			p.OnServiceAdd(service("a", "10.96.0.1", ports(n)))
			e.failWith(allFail)
		},
		"many ports that fail again": func(p *proxier.Proxier, e *fakeEngine, n int) {
			p.OnServiceAdd(service("a", "10.96.0.1", ports(n)))
			e.failWith(allFail)
			_ = p.SyncNow(t.Context())
		},
		"many ports that cannot be removed": func(p *proxier.Proxier, e *fakeEngine, n int) {
			p.OnServiceAdd(service("a", "10.96.0.1", ports(n)))
			_ = p.SyncNow(t.Context())
			p.OnServiceDelete(service("a", "10.96.0.1"))
			e.failWith(allFail)
		},
		"many Services with one VIP": func(p *proxier.Proxier, _ *fakeEngine, n int) {
			for i := range n {
				p.OnServiceAdd(service(fmt.Sprint(i), fmt.Sprintf("10.96.%d.%d", 1+i>>8, i&255), proxiertest.ExternalIPs("203.0.113.1")))
			}
		},
		"all of many Services with one VIP": func(p *proxier.Proxier, _ *fakeEngine, n int) {
			for i := range n {
				p.OnServiceAdd(service(fmt.Sprint(i), fmt.Sprintf("10.96.%d.%d", 1+i>>8, i&255), proxiertest.ExternalIPs("203.0.113.1")))
			}
			_ = p.SyncNow(t.Context())
			p.OnNodeChange(changetracker.Node{Name: "here"}) // leads to a full sync
		},
		"many VIPs that another Service has": func(p *proxier.Proxier, _ *fakeEngine, n int) {
			p.OnServiceAdd(service("a", "10.96.0.1", vips(n)))
			p.OnServiceAdd(service("b", "10.96.0.2", vips(n)))
		},
		"many VIPs that are removed": func(p *proxier.Proxier, _ *fakeEngine, n int) {
			p.OnServiceAdd(service("a", "10.96.0.1", vips(n)))
			_ = p.SyncNow(t.Context())
			p.OnServiceUpdate(nil, service("a", "10.96.0.1", vips(n), func(s *v1.Service) {
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs[n/2:], "203.0.200.200")
			}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			proportion.Check(t, 1_500, func(n int) func() {
				engine := &fakeEngine{}
				p := newProxier(t, proxier.Deps{Conntrack: (&fakeConntrack{}).conntrack()}, engine)
				p.OnServiceSynced()
				p.OnEndpointSlicesSynced()
				_ = p.SyncNow(t.Context()) // the next one is not full
				prepare(p, engine, n)
				return func() { _ = p.SyncAll(t.Context()) }
			})
		})
	}
}

func allFail(u desired.Update) error {
	var failed someError
	for i := range u.Changes {
		failed = append(failed, &proxier.ServiceError{Name: u.Changes[i].Name, Err: errors.New("no")})
	}
	return failed
}
