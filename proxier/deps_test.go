package proxier_test

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// fakeHealth records the updates.
type fakeHealth struct {
	mu         sync.Mutex // guards all below
	updates    map[v1.IPFamily][]proxier.HealthUpdate
	running    bool
	conditions []proxier.Condition
}

func (h *fakeHealth) Update(family v1.IPFamily, u proxier.HealthUpdate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.updates == nil {
		h.updates = map[v1.IPFamily][]proxier.HealthUpdate{}
	}
	h.updates[family] = append(h.updates[family], u)
}

func (h *fakeHealth) Run(ctx context.Context, status func() proxier.Status) error {
	h.set(func() { h.running = true })
	_ = status()
	<-ctx.Done()
	time.Sleep(time.Second) // Run must wait for it
	h.set(func() { h.running = false })
	return nil
}

func (h *fakeHealth) Conditions() []proxier.Condition {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.conditions)
}

func (h *fakeHealth) set(change func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change()
}

// take returns the updates of IPv4 since the last call.
func (h *fakeHealth) take() []proxier.HealthUpdate {
	h.mu.Lock()
	defer h.mu.Unlock()
	updates := h.updates[v1.IPv4Protocol]
	h.updates = nil
	return updates
}

// loadBalancer makes a Service one of type LoadBalancer with a health check node port.
func loadBalancer(healthPort int32) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = healthPort
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}}
	}
}

func exposedElsewhere(s *v1.Service) { s.Annotations = map[string]string{"expose-on": "pool=edge"} }

// TestHealthChecksHearOfWhatIsProgrammed: HC-01, HC-15. A failed sync updates nothing, and
// the next one loses nothing (as in W-23).
func TestHealthChecksHearOfWhatIsProgrammed(t *testing.T) {
	h := &fakeHealth{}
	config := proxier.Config{Node: changetracker.Node{Name: "here"}, NodePorts: proxier.NodePorts{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
		p.ExposeOn = changetracker.NodeSelector(s.Annotations["expose-on"])
	}
	runWith(t, config, proxier.Deps{Health: h}, func(t *testing.T, f *fixture) {
		a, b := types.NamespacedName{Namespace: "test", Name: "a"}, types.NamespacedName{Namespace: "test", Name: "b"}
		f.OnServiceAdd(service("a", "10.0.0.1", loadBalancer(30001)))
		f.OnServiceAdd(service("b", "10.0.0.2"))
		f.synced()
		synctest.Wait()
		first := h.take()
		if len(first) != 1 || !first[0].Full || len(first[0].Ports) != 1 || first[0].Ports[a] != 30001 || first[0].LocalEndpoints[a] != 0 ||
			!slices.Equal(first[0].NodePortAddresses, config.NodePorts.Addresses) {
			t.Fatalf("first update: %+v, want a full one: a without endpoints", first)
		}

		f.v4.failWith(func(desired.Update) error { return errors.New("no") })
		here := slice("a", "10.1.0.1", "10.1.0.2")
		here.Endpoints[0].NodeName = new("here")
		f.OnEndpointSliceAdd(here)
		pass(time.Second)
		if updates := h.take(); len(updates) != 0 {
			t.Errorf("updates after a failed sync: %+v, want none", updates)
		}
		f.v4.failWith(nil)
		pass(time.Minute)
		updates := h.take()
		if len(updates) != 1 || updates[0].Ports[a] != 30001 || updates[0].LocalEndpoints[a] != 1 {
			t.Errorf("updates after the failure: %+v, want a with 1 endpoint", updates)
		}

		for step, c := range []struct {
			do   func()
			want map[types.NamespacedName]uint16
		}{
			{func() { f.OnEndpointSliceAdd(slice("b", "10.1.0.9")) }, nil},
			{func() { f.OnServiceUpdate(nil, service("b", "10.0.0.2", loadBalancer(30002))) }, map[types.NamespacedName]uint16{b: 30002}},
			{func() { f.OnServiceUpdate(nil, service("b", "10.0.0.2", loadBalancer(30002), exposedElsewhere)) }, map[types.NamespacedName]uint16{b: 0}},
			{func() { f.OnServiceUpdate(nil, service("b", "10.0.0.2", loadBalancer(30002))) }, map[types.NamespacedName]uint16{b: 30002}},
			{func() { f.OnEndpointSliceDelete(here) }, map[types.NamespacedName]uint16{a: 30001}},
			{func() { f.OnServiceUpdate(nil, service("a", "10.0.0.1")) }, map[types.NamespacedName]uint16{a: 0}},
			{func() { f.OnServiceDelete(service("b", "10.0.0.2")) }, map[types.NamespacedName]uint16{b: 0}},
		} {
			c.do()
			pass(time.Second)
			var got map[types.NamespacedName]uint16
			for _, u := range h.take() {
				got = u.Ports
				if u.Full {
					t.Errorf("step %d: full update, want a partial one", step)
				}
			}
			if !maps.Equal(got, c.want) {
				t.Errorf("step %d: update of %+v, want %+v", step, got, c.want)
			}
		}
		h.set(func() { h.conditions = []proxier.Condition{{Type: proxier.ConditionHealthCheckPort, Message: "busy"}} })
		if s := f.Status(); len(s.Conditions) != 1 || s.Conditions[0].Message != "busy" {
			t.Errorf("conditions %+v, want the health check's", s.Conditions)
		}
	})
	if h.running {
		t.Error("Run returned before Health.Run")
	}
}

// fakeSettings fail for the first calls of Apply.
type fakeSettings struct {
	missing  atomic.Int32
	restored int
	failure  error
}

func (s *fakeSettings) Apply(context.Context) []proxier.Condition {
	if s.missing.Load() == 0 {
		return nil
	}
	s.missing.Add(-1)
	return []proxier.Condition{{Type: proxier.ConditionKernelSettings, Since: time.Now(), Message: "not there"}}
}

func (s *fakeSettings) Restore(context.Context) error {
	s.restored++
	return s.failure
}

// Settings are tried again, without any event: a failed setting is a condition with the time of its first failure,
// and not an error of a sync. What has succeeded is not tried again.
func TestSettingsAreTriedAgain(t *testing.T) {
	s := &fakeSettings{}
	s.missing.Store(8)
	runWith(t, proxier.Config{}, proxier.Deps{Settings: s}, func(t *testing.T, f *fixture) {
		began := time.Now()
		synctest.Wait()
		time.Sleep(time.Minute)
		synctest.Wait()
		c := f.Status().Conditions
		if len(c) != 1 || c[0].Type != proxier.ConditionKernelSettings || !c[0].Since.Equal(began) || s.missing.Load() != 2 {
			t.Errorf("conditions %+v with %d failures left, want one since %v and 2 failures left", c, s.missing.Load(), began)
		}
		pass(3 * time.Minute)
		if c := f.Status().Conditions; len(c) != 0 || s.missing.Load() != 0 {
			t.Errorf("conditions %+v with %d failures left, want none", c, s.missing.Load())
		}
		s.missing.Store(1)
		pass(time.Hour)
		if s.missing.Load() != 1 {
			t.Error("settings are applied again that have not failed")
		}
	})
}

func TestCleanupRestoresSettings(t *testing.T) {
	s := &fakeSettings{failure: errors.New("read-only")}
	v4 := &fakeEngine{}
	p := newProxier(t, proxier.Deps{Settings: s}, v4)
	if err := p.Cleanup(t.Context()); !errors.Is(err, s.failure) || s.restored != 1 || v4.cleaned != 1 {
		t.Errorf("Cleanup = %v, %d restored, %d cleaned, want %v, 1 and 1", err, s.restored, v4.cleaned, s.failure)
	}
}

// The history keeps the last syncs with their stages in order.
func TestHistoryKeepsTheLastSyncs(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.synced()
		for i := range 2 * proxier.HistoryLength {
			f.OnServiceUpdate(nil, service("a", netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).Next().String()))
			time.Sleep(2 * time.Second)
		}
		synctest.Wait()
		reports := f.History()
		if len(reports) != proxier.HistoryLength {
			t.Fatalf("%d reports, want %d", len(reports), proxier.HistoryLength)
		}
		for i := range reports {
			r := &reports[i]
			if i > 0 && r.Started.Before(reports[i-1].Started) {
				t.Errorf("report %d began before report %d", i, i-1)
			}
			var names []string
			for _, s := range r.Stages {
				names = append(names, s.Name)
			}
			if got, want := strings.Join(names, " "), "tracker resolve plan apply"; got != want {
				t.Errorf("stages %q, want %q", got, want)
			}
		}
	})
}

type noLocal struct{ internal, external int }

// Partial and full syncs count the service ports without local endpoints: MET-11.
func TestServicePortsWithoutLocalEndpointsAreCounted(t *testing.T) {
	run(t, proxier.Config{Node: changetracker.Node{Name: "here"}}, func(t *testing.T, f *fixture) {
		f.synced()
		wait := func(what string, want noLocal) {
			t.Helper()
			pass(2 * time.Second)
			s := f.Status().Families[v1.IPv4Protocol]
			if got := (noLocal{s.NoLocalInternal, s.NoLocalExternal}); got != want {
				t.Errorf("%s: %+v, want %+v", what, got, want)
			}
		}
		internal := func(s *v1.Service) {
			s.Spec.InternalTrafficPolicy = new(v1.ServiceInternalTrafficPolicyLocal)
		}
		f.OnServiceAdd(service("a", "10.0.0.1", loadBalancer(30001), internal, proxiertest.ExternalIPs("192.0.2.1")))
		f.OnServiceAdd(service("b", "10.0.0.2", loadBalancer(30002), proxiertest.ExternalIPs("192.0.2.2")))
		wait("no endpoints at all", noLocal{})
		elsewhere := slice("a", "10.1.0.1")
		f.OnEndpointSliceAdd(elsewhere)
		wait("a elsewhere", noLocal{internal: 1, external: 1})
		f.OnEndpointSliceAdd(slice("b", "10.1.0.2"))
		wait("b elsewhere too", noLocal{internal: 1, external: 2})
		f.OnNodeChange(changetracker.Node{Name: "here", Zone: "z"})
		wait("after a full sync", noLocal{internal: 1, external: 2})
		here := slice("a", "10.1.0.1")
		here.Endpoints[0].NodeName = new("here")
		f.OnEndpointSliceUpdate(elsewhere, here)
		wait("a here", noLocal{external: 1})
		f.OnServiceDelete(service("b", "10.0.0.2"))
		wait("b gone", noLocal{})
	})
}

// A draining node is no reason to sync, but Status has it.
func TestADrainingNodeIsNoReasonToSync(t *testing.T) {
	run(t, proxier.Config{Node: changetracker.Node{Name: "here"}}, func(t *testing.T, f *fixture) {
		f.synced()
		synctest.Wait()
		before := len(f.v4.updates())
		f.OnNodeChange(changetracker.Node{Name: "here", Draining: "deleted"})
		pass(time.Minute)
		if got := len(f.v4.updates()); got != before {
			t.Errorf("%d updates, want %d as before", got, before)
		}
		if got := f.Status().Node.Draining; got != "deleted" {
			t.Errorf("Status.Node.Draining = %q, want deleted", got)
		}
	})
}

// Explain tells which service ports are programmed and which failed.
func TestExplainTellsOfWhatIsProgrammed(t *testing.T) {
	packet := desired.Packet{
		Protocol: desired.TCP, Source: netip.MustParseAddr("10.1.0.9"), Destination: netip.MustParseAddrPort("10.0.0.1:80"), Origin: desired.FromPod,
	}
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		ctx := t.Context()
		if _, err := f.Explain(ctx, packet); !errors.Is(err, proxier.ErrNotProgrammed) {
			t.Errorf("Explain before the first sync = %v, want %v", err, proxier.ErrNotProgrammed)
		}
		if _, err := f.Explain(ctx, desired.Packet{}); !errors.Is(err, desired.ErrPacket) {
			t.Errorf("Explain of nothing = %v, want %v", err, desired.ErrPacket)
		}
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.OnEndpointSliceAdd(slice("a", "10.1.0.1"))
		f.synced()
		synctest.Wait()
		e, err := f.Explain(ctx, packet)
		if err != nil || e.Verdict != desired.VerdictForward || len(e.Endpoints) != 1 {
			t.Errorf("Explain = %+v, %v, want one endpoint to forward to", e, err)
		}
		if s, ok := f.Resolved(v1.IPv4Protocol).Service(*e.Service); !ok || len(s.Frontends) != 1 {
			t.Errorf("Resolved = %+v, %v, want one frontend", s, ok)
		}
		if f.Programmed(v1.IPv4Protocol).Len() != 1 || f.Programmed(v1.IPv6Protocol).Len() != 0 {
			t.Error("Programmed: want one service port of IPv4 and none of IPv6")
		}

		refused := someError{{Name: *e.Service, Err: errors.New("too long")}}
		f.v4.failWith(func(desired.Update) error { return refused })
		f.OnEndpointSliceAdd(slice("a", "10.1.0.1", "10.1.0.2"))
		pass(2 * time.Second)
		if e, err = f.Explain(ctx, packet); err != nil || !strings.Contains(strings.Join(e.Reasons, "; "), "too long") {
			t.Errorf("Explain = %q, %v, want a reason that it could not be programmed", e.Reasons, err)
		}
	})
}

// Explain asks for the node's addresses if Deps.LocalAddresses is set.
func TestExplainAsksForTheNodesAddresses(t *testing.T) {
	var failure error
	addresses := func(context.Context) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("192.0.2.7")}, failure
	}
	runWith(t, proxier.Config{}, proxier.Deps{LocalAddresses: addresses}, func(t *testing.T, f *fixture) {
		f.OnServiceAdd(service("a", "10.0.0.1", func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeNodePort
			s.Spec.Ports[0].NodePort = 30080
		}))
		f.synced()
		synctest.Wait()
		packet := desired.Packet{
			Protocol: desired.TCP, Source: netip.MustParseAddr("198.51.100.1"), Destination: netip.MustParseAddrPort("192.0.2.7:30080"), Origin: desired.FromOutside,
		}
		if e, err := f.Explain(t.Context(), packet); err != nil || e.Verdict != desired.VerdictReject {
			t.Errorf("Explain = %v, %v, want it rejected: it is the node's address, and there are no endpoints", e.Verdict, err)
		}
		failure = errors.New("no privilege")
		if _, err := f.Explain(t.Context(), packet); !errors.Is(err, failure) {
			t.Errorf("Explain = %v, want %v", err, failure)
		}
	})
}

// TestAHealthCheckEndsThoughItsServiceWasNeverProgrammed: the engine refuses a Service with a
// health check node port, which is served all the same until the Service is deleted.
func TestAHealthCheckEndsThoughItsServiceWasNeverProgrammed(t *testing.T) {
	h := &fakeHealth{}
	runWith(t, withoutRetries(), proxier.Deps{Health: h}, func(t *testing.T, f *fixture) {
		name := types.NamespacedName{Namespace: "test", Name: "a"}
		f.v4.become(func(u desired.Update) (result proxier.Result, err error) {
			for s := range u.Services() {
				result.Failed = append(result.Failed, &proxier.ServiceError{Name: s.Name, Err: errors.New("refused"), Partial: true})
			}
			return result, nil
		})
		f.synced()
		synctest.Wait()
		refused := service("a", "10.0.0.1", loadBalancer(30001))
		f.Tracker().Services.Update(nil, refused)
		_ = f.Sync(t.Context()) // it returns the refusal
		synctest.Wait()
		if got := h.take(); len(got) == 0 || got[len(got)-1].Ports[name] != 30001 {
			t.Fatalf("health updates %+v, want port 30001", got)
		}
		f.Tracker().Services.Delete(name)
		if err := f.Sync(t.Context()); err != nil {
			t.Fatalf("sync: %v", err)
		}
		got := h.take()
		if len(got) != 1 {
			t.Fatalf("%d health updates after the deletion, want one", len(got))
		}
		if port, told := got[0].Ports[name]; !told || port != 0 {
			t.Errorf("health update %+v, want that the port is gone", got[0])
		}
	})
}
