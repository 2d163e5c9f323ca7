package proxier_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// fakeConntrack records the checks of IPv4, and fails on request. It tracks TCP, or nothing.
type fakeConntrack struct {
	tracksNothing bool

	mu     sync.Mutex // guards all below
	checks []desired.FlowCheck
	err    error
}

func (c *fakeConntrack) Tracks(p desired.Protocol) bool { return p == desired.TCP && !c.tracksNothing }

func (c *fakeConntrack) Clean(_ context.Context, family v1.IPFamily, check desired.FlowCheck) (int, error) {
	if family != v1.IPv4Protocol {
		return 0, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checks = append(c.checks, check)
	return 0, c.err
}

func (c *fakeConntrack) conntrack() *proxier.Conntrack {
	return &proxier.Conntrack{Tracks: c.Tracks, Clean: c.Clean}
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

func runWithFlows(t *testing.T, test func(t *testing.T, f *fixture, c *fakeConntrack)) {
	t.Helper()
	c := &fakeConntrack{}
	runWith(t, proxier.Config{}, proxier.Deps{Conntrack: c.conntrack()}, func(t *testing.T, f *fixture) { test(t, f, c) })
}

// TestFlowsAreLookedAtOnlyWhenServersGo: CT-01, without W-23. The conntrack table is not
// read for a change that cannot make a flow stale.
func TestFlowsAreLookedAtOnlyWhenServersGo(t *testing.T) {
	runWithFlows(t, func(t *testing.T, f *fixture, c *fakeConntrack) {
		want := 0
		step := func(what string, checks int, change func()) {
			t.Helper()
			want += checks
			change()
			time.Sleep(time.Second)
			if got := c.count(); got != want {
				t.Errorf("%s: %d checks of flows, want %d", what, checks+got-want, checks)
				want = got
			}
		}
		step("no Services", 0, f.synced)
		step("a new frontend", 1, func() { f.OnServiceAdd(service("a", "10.96.0.1")) })
		step("the first endpoint", 1, func() { f.OnEndpointSliceAdd(slice("a", "10.0.0.1")) })
		step("another endpoint", 0, func() { f.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.1", "10.0.0.2")) })
		step("one endpoint less", 1, func() { f.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.2")) })
		step("another VIP", 1, func() { f.OnServiceUpdate(nil, service("a", "10.96.0.1", proxiertest.ExternalIPs("198.51.100.1"))) })
		guarded := func(ranges ...string) func() {
			return func() {
				f.OnServiceUpdate(nil, service("a", "10.96.0.1", proxiertest.ExternalIPs("198.51.100.1"), func(s *v1.Service) {
					s.Spec.Type, s.Spec.LoadBalancerSourceRanges = v1.ServiceTypeLoadBalancer, ranges
					s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "198.51.100.2"}}
				}))
			}
		}
		step("a load balancer", 1, guarded())
		step("with source ranges", 1, guarded("192.0.2.0/24", "198.51.100.0/24"))
		step("with fewer", 1, guarded("192.0.2.0/24"))
		if check := c.last(); len(check.Frontends) != 1 || len(check.Frontends[0].SourceRanges) != 1 {
			t.Errorf("the last check was %+v, want the load balancer's frontend with its one range", check.Frontends)
		}
		step("open to all", 0, guarded())
		step("no load balancer", 1, func() { f.OnServiceUpdate(nil, service("a", "10.96.0.1", proxiertest.ExternalIPs("198.51.100.1"))) })
		step("deleted", 1, func() { f.OnServiceDelete(service("a", "10.96.0.1", proxiertest.ExternalIPs("198.51.100.1"))) })
		if check := c.last(); len(check.Frontends) != 2 || !check.Frontends[0].Gone || !check.Frontends[1].Gone {
			t.Errorf("the last check was %+v, want both frontends gone", check.Frontends)
		}
	})
}

// TestFlowsOfTheTimeOfDamageAreLookedAt: packets were not translated while rules were missing,
// and the flows that began then would stay so for ever.
func TestFlowsOfTheTimeOfDamageAreLookedAt(t *testing.T) {
	runWithFlows(t, func(t *testing.T, f *fixture, c *fakeConntrack) {
		for i, name := range []string{"a", "b"} {
			f.OnServiceAdd(service(name, fmt.Sprintf("10.96.0.%d", i+1)))
		}
		f.synced()
		synctest.Wait()
		b, _ := f.v4.last().Now.Owner(desired.Key{VIP: netip.MustParseAddr("10.96.0.2"), Protocol: desired.TCP, Port: 80})
		for what, step := range map[string]struct {
			damage    proxier.Damage
			fails     bool
			frontends int
		}{
			"all rules":                       {damage: tableGone, frontends: 2},
			"those of one service port":       {damage: proxier.Damage{Object: "group 7", Service: b}, frontends: 1},
			"one, and the first repair fails": {damage: proxier.Damage{Object: "group 7", Service: b}, fails: true, frontends: 1},
		} {
			before := c.count()
			if step.fails {
				f.v4.failWith(func(desired.Update) error { return errors.New("busy") })
			}
			f.v4.damage(step.damage)
			time.Sleep(100 * time.Millisecond)
			if step.fails && c.count() != before {
				t.Errorf("%s: flows are deleted while rules are missing", what)
			}
			f.v4.failWith(nil)
			time.Sleep(time.Minute)
			if got := c.count() - before; got != 1 || len(c.last().Frontends) != step.frontends {
				t.Errorf("%s: %d checks, the last one of %d frontends, want one of %d", what, got, len(c.last().Frontends), step.frontends)
			}
		}
	})
}

// If TCP is not tracked, connections that began without rules are looked at after the first sync, after each
// repair, for a new frontend, and at no other time.
func TestConnectionsThatBeganWithoutRulesAreLookedAt(t *testing.T) {
	c := &fakeConntrack{tracksNothing: true}
	runWith(t, proxier.Config{}, proxier.Deps{Conntrack: c.conntrack()}, func(t *testing.T, f *fixture) {
		for i, name := range []string{"a", "b"} {
			f.OnServiceAdd(service(name, fmt.Sprintf("10.96.0.%d", i+1)))
		}
		f.synced()
		synctest.Wait()
		b, _ := f.v4.last().Now.Owner(desired.Key{VIP: netip.MustParseAddr("10.96.0.2"), Protocol: desired.TCP, Port: 80})
		checked := 0
		for _, step := range []struct {
			what      string
			frontends int // that are checked
			do        func()
		}{
			{"the first sync", 2, func() {}},
			{"a new endpoint", 0, func() { f.OnEndpointSliceAdd(slice("a", "10.244.0.1")) }},
			{"no endpoint", 0, func() { f.OnEndpointSliceDelete(slice("a")) }},
			{"a frontend more", 1, func() { f.OnServiceAdd(service("a", "10.96.0.1", proxiertest.ExternalIPs("203.0.113.1"))) }},
			{"a frontend less", 0, func() { f.OnServiceAdd(service("a", "10.96.0.1")) }},
			{"all rules are damaged", 2, func() { f.v4.damage(tableGone) }},
			{"those of one service port", 1, func() { f.v4.damage(proxier.Damage{Object: "group 7", Service: b}) }},
			{"one, and the first repair fails", 1, func() {
				f.v4.failWith(func(desired.Update) error { return errors.New("busy") })
				f.v4.damage(proxier.Damage{Object: "group 7", Service: b})
				time.Sleep(100 * time.Millisecond)
				if c.count() != checked {
					t.Error("flows are deleted while rules are missing")
				}
				f.v4.failWith(nil)
			}},
		} {
			step.do()
			time.Sleep(time.Minute)
			want := checked + min(step.frontends, 1)
			if checked = c.count(); checked != want {
				t.Errorf("%s: %d checks, want %d", step.what, checked, want)
			}
			if last := c.last(); step.frontends > 0 && (len(last.Untranslated) != step.frontends || len(last.Frontends) > 0) {
				t.Errorf("%s: the check is of %+v, want %d untranslated frontends", step.what, last, step.frontends)
			}
		}
	})
}

// TestFlowsThatCannotBeDeletedStayPending: a failure makes a condition, fails no sync, and is retried
// with pauses that grow, but for a kernel without the feature. Meanwhile no versions are programmed.
func TestFlowsThatCannotBeDeletedStayPending(t *testing.T) {
	runWithFlows(t, func(t *testing.T, f *fixture, c *fakeConntrack) {
		f.synced()
		for name, failure := range map[string]error{
			"busy": errors.New("busy"), "missing": &proxier.UnsupportedError{Feature: "conntrack", Err: errors.New("no such protocol")},
		} {
			c.fail(failure)
			before := c.count()
			f.OnServiceAdd(service(name, "10.96.0.1"))
			time.Sleep(10 * time.Second)
			conditions := f.Status().Conditions
			if len(conditions) != 1 || conditions[0].Type != proxier.ConditionStaleFlows || conditions[0].Family != v1.IPv4Protocol {
				t.Errorf("%s: conditions %+v, want stale flows", name, conditions)
			}
			if err := f.Status().Families[v1.IPv4Protocol].LastError; err != nil {
				t.Errorf("%s: the sync failed: %v", name, err)
			}
			retried := c.count()-before > 1+proxier.MaxModuleWaits
			if unsupported := errors.Is(failure, proxier.ErrNotSupported); retried == unsupported || c.count()-before > 10 {
				t.Errorf("%s: retried %v, %d times; want it, a few times, unless it can never succeed", name, retried, c.count()-before)
			}
			c.fail(nil)
			f.Trigger()
			time.Sleep(time.Minute)
			if check := c.last(); len(check.Frontends) == 0 || len(f.Status().Conditions) != 0 {
				t.Errorf("%s: the last check was %+v, conditions %+v; want the pending flows and no condition", name, check, f.Status().Conditions)
			}
			f.OnServiceDelete(service(name, "10.96.0.1"))
			synctest.Wait()
		}
	})
}

// Flows of a frontend that cannot be removed go on until it is removed.
func TestFlowsOfWhatCannotBeTakenAwayGoOn(t *testing.T) {
	runWithFlows(t, func(t *testing.T, f *fixture, c *fakeConntrack) {
		a := service("a", "10.0.0.1")
		f.OnServiceAdd(a)
		f.synced()
		_ = f.Sync(t.Context())
		before := c.count()
		f.v4.failWith(func(u desired.Update) error { return someError{{Name: u.Changes[0].Name, Err: errors.New("busy")}} })
		f.OnServiceDelete(a)
		if _ = f.Sync(t.Context()); c.count() != before {
			t.Errorf("%+v is checked while the frontend is still programmed", c.last())
		}
		f.v4.failWith(nil)
		pass(time.Hour)
		if n := c.count(); n != before+1 || len(c.last().Frontends) != 1 || !c.last().Frontends[0].Gone {
			t.Errorf("%d checks, the last one %+v, want one of the removed frontend", n-before, c.last())
		}
	})
}

// Flows of an earlier process go on if the first sync fails for their service port: they end when their endpoint
// does, or when no Service has the frontend.
func TestFlowsOfAnEarlierProcessGoOnIfTheFirstSyncFails(t *testing.T) {
	runWithFlows(t, func(t *testing.T, f *fixture, c *fakeConntrack) {
		f.v4.failWith(func(u desired.Update) error {
			for i := range u.Changes {
				if name := u.Changes[i].Name; name.Name == "a" {
					return someError{{Name: name, Err: errors.New("busy")}}
				}
			}
			return nil
		})
		key := func(vip string) desired.Key {
			return desired.Key{VIP: netip.MustParseAddr(vip), Protocol: desired.TCP, Port: 80}
		}
		checked := func(k desired.Key) (found desired.Flows) {
			for _, flows := range c.last().Frontends {
				if flows.Key == k {
					found = flows
				}
			}
			return found
		}
		f.OnServiceCIDRsChanged([]netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")})
		f.OnEndpointSliceAdd(slice("a", "10.244.0.1"))
		f.OnServiceAdd(service("a", "10.96.0.1", proxiertest.ExternalIPs("198.51.100.1")))
		f.synced()
		synctest.Wait()
		if flows := checked(key("10.96.0.1")); len(c.last().ServiceCIDRs) != 1 || flows.Gone || flows.Serving.Len() != 1 {
			t.Errorf("the first check is %+v, want the flows to 10.244.0.1 left alone", c.last())
		}
		f.OnServiceUpdate(nil, service("a", "10.96.0.2"))
		f.OnServiceAdd(service("b", "10.96.0.1"))
		pass(time.Second)
		if flows := checked(key("10.96.0.1")); flows.Gone || flows.Serving.Len() != 0 {
			t.Errorf("another Service has the frontend: %+v, want its own endpoints", flows)
		}
		f.v4.failWith(nil)
		pass(time.Hour)
		if !checked(key("198.51.100.1")).Gone || checked(key("10.96.0.1")).Gone || checked(key("10.96.0.2")).Serving.Len() != 1 {
			t.Errorf("the check when a is programmed is %+v, want that 198.51.100.1 is gone", c.last())
		}
	})
}
