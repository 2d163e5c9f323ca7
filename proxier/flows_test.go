package proxier

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
)

// fakeConntrack remembers what it was asked, and fails on request.
type fakeConntrack struct {
	mu     sync.Mutex // guards all below
	checks []desired.FlowCheck
	err    error
}

func (c *fakeConntrack) Tracks(p desired.Protocol) bool { return p == desired.TCP }

func (c *fakeConntrack) Clean(_ context.Context, _ v1.IPFamily, check desired.FlowCheck) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checks = append(c.checks, check)
	return 0, c.err
}

func (c *fakeConntrack) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

func (c *fakeConntrack) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.checks)
}

func (c *fakeConntrack) last() desired.FlowCheck {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.checks[len(c.checks)-1]
}

func runWithFlows(t *testing.T, test func(t *testing.T, p *Proxier, c *fakeConntrack)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &fakeConntrack{}
		p, err := New(Config{Families: []v1.IPFamily{v1.IPv4Protocol}}, Deps{Conntrack: c}, map[v1.IPFamily]Engine{v1.IPv4Protocol: &fakeEngine{}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		test(t, p, c)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
}

// TestFlowsAreLookedAtOnlyWhenServersGo (CT-01 with W-23 mended): no table is read
// for a change that cannot make a flow stale.
func TestFlowsAreLookedAtOnlyWhenServersGo(t *testing.T) {
	runWithFlows(t, func(t *testing.T, p *Proxier, c *fakeConntrack) {
		want := 0
		step := func(what string, looks int, change func()) {
			t.Helper()
			want += looks
			change()
			time.Sleep(time.Second)
			if got := c.count(); got != want {
				t.Errorf("%s: looked at flows %d times, want %d", what, looks+got-want, looks)
				want = got
			}
		}
		step("nothing to look at", 0, func() { p.OnServiceSynced(); p.OnEndpointSlicesSynced() })
		step("a new frontend", 1, func() { p.OnServiceAdd(service("a", "10.96.0.1")) })
		step("the first endpoint", 1, func() { p.OnEndpointSliceAdd(slice("a", "10.0.0.1")) })
		step("another endpoint", 0, func() { p.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.1", "10.0.0.2")) })
		step("one endpoint less", 1, func() { p.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.2")) })
		step("another VIP", 1, func() { p.OnServiceUpdate(nil, service("a", "10.96.0.1", externalIP("198.51.100.1"))) })
		guarded := func(ranges ...string) func() {
			return func() {
				p.OnServiceUpdate(nil, service("a", "10.96.0.1", externalIP("198.51.100.1"), func(s *v1.Service) {
					s.Spec.Type, s.Spec.LoadBalancerSourceRanges = v1.ServiceTypeLoadBalancer, ranges
					s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "198.51.100.2"}}
				}))
			}
		}
		step("a load balancer", 1, guarded())
		step("with source ranges", 1, guarded("192.0.2.0/24", "198.51.100.0/24"))
		step("with fewer", 1, guarded("192.0.2.0/24"))
		if check := c.last(); len(check.Frontends) != 1 || len(check.Frontends[0].SourceRanges) != 1 {
			t.Errorf("the last look was for %+v, want the load balancer's frontend with its one range", check.Frontends)
		}
		step("open to all", 0, guarded())
		step("no load balancer", 1, func() { p.OnServiceUpdate(nil, service("a", "10.96.0.1", externalIP("198.51.100.1"))) })
		step("deleted", 1, func() { p.OnServiceDelete(service("a", "10.96.0.1", externalIP("198.51.100.1"))) })
		if check := c.last(); len(check.Frontends) != 2 || !check.Frontends[0].Gone || !check.Frontends[1].Gone {
			t.Errorf("the last look was for %+v, want both frontends gone", check.Frontends)
		}
	})
}

// TestFlowsThatCannotBeCleanedStayInTheBook: a failure is retried like that of a
// sync; a kernel without the feature makes a condition, and no sync fail.
func TestFlowsThatCannotBeCleanedStayInTheBook(t *testing.T) {
	runWithFlows(t, func(t *testing.T, p *Proxier, c *fakeConntrack) {
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		for name, failure := range map[string]error{
			"busy": errors.New("busy"), "missing": &UnsupportedError{Feature: "conntrack", Err: errors.New("no such protocol")},
		} {
			c.fail(failure)
			before := c.count()
			p.OnServiceAdd(service(name, "10.96.0.1"))
			time.Sleep(10 * time.Second)
			conditions := p.Status().Conditions
			if len(conditions) != 1 || conditions[0].Type != ConditionStaleFlows || conditions[0].Family != v1.IPv4Protocol {
				t.Errorf("%s: conditions %+v, want stale flows", name, conditions)
			}
			failed := p.Status().Families[v1.IPv4Protocol].LastError != nil
			retried := c.count()-before > 1+maxModuleWaits
			if unsupported := errors.Is(failure, ErrNotSupported); failed == unsupported || retried == unsupported {
				t.Errorf("%s: sync failed %v, retried %v; want both unless it can never succeed", name, failed, retried)
			}
			c.fail(nil)
			p.Trigger()
			time.Sleep(time.Minute)
			if check := c.last(); len(check.Frontends) == 0 || len(p.Status().Conditions) != 0 {
				t.Errorf("%s: in the end looked at %+v, conditions %+v; want the flows looked at", name, check, p.Status().Conditions)
			}
			p.OnServiceDelete(service(name, "10.96.0.1"))
			synctest.Wait()
		}
	})
}

// TestFlowsOfWhatCannotBeTakenAwayGoOn until it can be.
func TestFlowsOfWhatCannotBeTakenAwayGoOn(t *testing.T) {
	runWithFlows(t, func(t *testing.T, p *Proxier, c *fakeConntrack) {
		engine, _ := p.families[0].engine.(*fakeEngine)
		a := service("a", "10.0.0.1")
		p.OnServiceAdd(a)
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		_ = p.Sync(t.Context())
		before := c.count()
		engine.failWith(func(u desired.Update) error { return someError{{Name: u.Changes[0].Name, Err: errors.New("busy")}} })
		p.OnServiceDelete(a)
		if _ = p.Sync(t.Context()); c.count() != before {
			t.Errorf("%+v is asked while the frontend is still there", c.last())
		}
		engine.failWith(nil)
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := c.count(); n != before+1 || len(c.last().Frontends) != 1 || !c.last().Frontends[0].Gone {
			t.Errorf("%d checks, the last one %+v, want one about what is gone", n-before, c.last())
		}
	})
}
