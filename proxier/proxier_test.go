package proxier_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// Nothing is written before both are synced (ENG-01).
func TestNothingIsWrittenBeforeBothAreSynced(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.OnServiceSynced()
		pass(2 * time.Hour)
		if n := len(f.v4.updates()); n != 0 {
			t.Fatalf("%d updates before the slices were synced, want 0", n)
		}
		if f.Status().Synced {
			t.Error("Status.Synced = true before the first sync, want false")
		}
		f.OnEndpointSlicesSynced()
		synctest.Wait()
		if u := f.v4.last(); !u.Full || namesIn(u) != "a" {
			t.Errorf("first update: full %v of %q, want a full one of a", u.Full, namesIn(u))
		}
		if !f.Status().Synced {
			t.Error("Status.Synced = false after the first sync, want true")
		}
	})
}

// TestSyncWaitsForWhatMustBeKnown: Sync must not return nil before the first sync, which
// waits for all inputs.
func TestSyncWaitsForWhatMustBeKnown(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		short, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := f.Sync(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Sync before the inputs are synced = %v, want %v", err, context.DeadlineExceeded)
		}
		answer := make(chan error, 1)
		go func() { answer <- f.Sync(t.Context()) }()
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.synced()
		if err := <-answer; err != nil || len(f.v4.updates()) == 0 {
			t.Errorf("Sync = %v after %d updates, want nil after one", err, len(f.v4.updates()))
		}
	})
}

// Sync of a proxy that has ended says so, also if the proxy was never ready.
func TestSyncOfAProxyThatHasEndedSaysSo(t *testing.T) {
	p := newProxier(t, proxier.Deps{}, &fakeEngine{})
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := p.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if err := p.Sync(t.Context()); !errors.Is(err, runner.ErrEnded) {
		t.Errorf("Sync = %v, want %v", err, runner.ErrEnded)
	}
}

// TestAFailedFirstSyncIsRetried: W-33 does not occur.
func TestAFailedFirstSyncIsRetried(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		broken := errors.New("broken")
		f.v4.failWith(func(desired.Update) error { return broken })
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.synced()
		pass(time.Second)
		if n := len(f.v4.updates()); n < 3 {
			t.Errorf("%d attempts within a second, want several", n)
		}
		s := f.Status()
		if s.Synced || !errors.Is(s.Families[v1.IPv4Protocol].LastError, broken) {
			t.Errorf("status = %+v, want not synced because of %v", s, broken)
		}
		if s.Families[v1.IPv4Protocol].PendingSince.IsZero() {
			t.Error("no change is pending after a failed sync")
		}
		if six := s.Families[v1.IPv6Protocol]; !six.Synced || six.LastError != nil {
			t.Errorf("IPv6 is affected by the failure of IPv4: %+v", six)
		}
		f.v4.failWith(nil)
		pass(time.Minute)
		if u := f.v4.last(); !u.Full || namesIn(u) != "a" {
			t.Errorf("update after failures: full %v of %q, want a full one of a", u.Full, namesIn(u))
		}
		if s := f.Status(); !s.Synced || s.Families[v1.IPv4Protocol].LastError != nil {
			t.Errorf("status after success = %+v", s)
		}
	})
}

// TestAModuleThatIsBeingLoadedIsWaitedFor: a missing kernel feature is a failure only if it
// stays missing.
func TestAModuleThatIsBeingLoadedIsWaitedFor(t *testing.T) {
	lacks := errors.Join(&proxier.UnsupportedError{Feature: "a feature", Err: errors.New("no such protocol")})
	for name, c := range map[string]struct {
		failures, attempts int
		failure            error
	}{
		"not missing":                {0, 1, nil},
		"missing for a moment":       {2, 3, lacks},
		"missing as long as allowed": {3, 4, lacks},
		"missing too long":           {4, 4, lacks},
		"another failure":            {1, 1, errors.New("broken")},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, withoutRetries(), func(t *testing.T, f *fixture) {
				left := c.failures
				f.v4.failWith(func(desired.Update) error {
					if left--; left >= 0 {
						return c.failure
					}
					return nil
				})
				f.OnServiceAdd(service("a", "10.0.0.1"))
				f.synced()
				pass(time.Second)
				err := f.Status().Families[v1.IPv4Protocol].LastError
				updates := f.v4.updates()
				if len(updates) != c.attempts || (err == nil) != (c.attempts > c.failures) {
					t.Errorf("sync ended with %v after %d attempts, want %d", err, len(updates), c.attempts)
				}
				for _, u := range updates {
					if !u.Full || namesIn(u) != "a" {
						t.Errorf("update: full %v of %q, want a full one of a", u.Full, namesIn(u))
					}
				}
			})
		})
	}
}

// TestAKernelThatLacksAFeatureIsNotAskedForever: later syncs fail at once, and a
// partial update is not repeated.
func TestAKernelThatLacksAFeatureIsNotAskedForever(t *testing.T) {
	run(t, withoutRetries(), func(t *testing.T, f *fixture) {
		f.synced()
		pass(time.Second)
		f.v4.failWith(func(desired.Update) error { return &proxier.UnsupportedError{} })
		f.Tracker().Services.Update(nil, service("a", "10.0.0.1"))     // without a Trigger
		for i, want := range []int{1, 1 + proxier.MaxModuleWaits, 1} { // partial, full, full
			before, began := len(f.v4.updates()), time.Now()
			err := f.Sync(t.Context())
			if n := len(f.v4.updates()) - before; err == nil || n != want || time.Since(began) > time.Second {
				t.Errorf("sync %d = %v after %d attempts and %v, want an error after %d", i, err, n, time.Since(began), want)
			}
		}
	})
}

// TestAnEndDoesNotWaitForModules: there is no retry after the end of ctx.
func TestAnEndDoesNotWaitForModules(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		began := time.Now()
		if f.WaitForModule(ctx, &proxier.UnsupportedError{}) || time.Since(began) > 0 {
			t.Errorf("waited %v and retries, want neither", time.Since(began))
		}
	})
}

func TestOneFailingServicePortHoldsUpNoOther(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.synced()
		synctest.Wait()
		time.Sleep(time.Second)
		refused := errors.New("refused")
		f.v4.failWith(func(u desired.Update) error {
			var failed someError
			for s := range u.Services() {
				if s.Name.Name == "bad" {
					failed = append(failed, &proxier.ServiceError{Name: s.Name, Err: refused})
				}
			}
			return failed
		})
		f.Tracker().Services.Update(nil, service("bad", "10.0.0.1")) // both for one sync
		f.OnServiceAdd(service("good", "10.0.0.2"))
		synctest.Wait()
		if u := f.v4.last(); u.Full || namesIn(u) != "bad good" {
			t.Errorf("update: full %v of %q, want a partial one of bad and good", u.Full, namesIn(u))
		}
		failed := f.Status().Families[v1.IPv4Protocol].Failed
		if len(failed) != 1 || failed[0].Name.Name != "bad" || !errors.Is(failed[0], refused) {
			t.Errorf("failed = %v, want bad", failed)
		}
		pass(time.Minute)
		if u := f.v4.last(); u.Full || namesIn(u) != "bad" {
			t.Errorf("retry: full %v of %q, want a partial one of bad alone", u.Full, namesIn(u))
		}
		f.v4.failWith(nil)
		pass(time.Minute)
		if failed := f.Status().Families[v1.IPv4Protocol].Failed; len(failed) != 0 {
			t.Errorf("failed = %v after success", failed)
		}
	})
}

func TestAnUpdateHoldsOnlyWhatChanged(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		for _, name := range []string{"a", "b", "c"} {
			f.OnServiceAdd(service(name, "10.0.0."+string('1'+name[0]-'a')))
		}
		f.synced()
		synctest.Wait()
		f.OnEndpointSliceAdd(slice("b", "10.1.0.1"))
		pass(time.Second)
		u := f.v4.last()
		if u.Full || namesIn(u) != "b" {
			t.Fatalf("update: full %v of %q, want a partial one of b", u.Full, namesIn(u))
		}
		if got, want := u.Changes[0].After.Cluster.Slice(), []netip.AddrPort{netip.MustParseAddrPort("10.1.0.1:8080")}; !slices.Equal(got, want) {
			t.Errorf("endpoints = %v, want %v", got, want)
		}
		f.OnServiceDelete(service("b", "10.0.0.2"))
		pass(time.Second)
		if u := f.v4.last(); u.Full || namesIn(u) != "" || len(u.Changes) != 1 || u.Changes[0].Name.Name != "b" {
			t.Errorf("update after delete: %+v, want b removed", u)
		}
	})
}

func TestEverythingIsCheckedOncePerFullSyncPeriod(t *testing.T) {
	run(t, proxier.Config{FullSyncPeriod: 10 * time.Minute}, func(t *testing.T, f *fixture) {
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.synced()
		synctest.Wait()
		before := len(f.v4.updates())
		pass(9 * time.Minute)
		if n := len(f.v4.updates()) - before; n != 0 {
			t.Errorf("%d updates in a quiet time, want 0", n)
		}
		pass(2 * time.Minute)
		if n := len(f.v4.updates()) - before; n != 1 || !f.v4.last().Full {
			t.Errorf("%d updates after the period, full %v, want one full update", n, f.v4.last().Full)
		}
	})
}

// TestANodeChangeReachesTheEngine: zone, addresses and CIDRs may change at run time; W-17
// does not occur.
func TestANodeChangeReachesTheEngine(t *testing.T) {
	config := proxier.Config{
		Node:       changetracker.Node{Name: "n", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}},
		NodePorts:  proxier.NodePorts{Primary: true},
		Masquerade: proxier.Masquerade{NodePodCIDRs: true},
	}
	run(t, config, func(t *testing.T, f *fixture) {
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.synced()
		synctest.Wait()
		g := f.v4.last().Globals
		if want := netip.MustParsePrefix("192.0.2.1/32"); len(g.NodePortAddresses) != 1 || g.NodePortAddresses[0] != want || g.DetectsPods() {
			t.Errorf("globals = %+v, want node ports on %v and no pods", g, want)
		}
		if six := f.v6.last().Globals.NodePortAddresses; len(six) != 0 {
			t.Errorf("node ports on %v in IPv6, want none: the node has no address there (W-29)", six)
		}
		node := config.Node
		node.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.2")}
		node.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}
		f.OnNodeChange(node)
		pass(time.Second)
		u := f.v4.last()
		if want := netip.MustParsePrefix("192.0.2.2/32"); !u.Full || u.Globals.NodePortAddresses[0] != want || !u.Globals.DetectsPods() {
			t.Errorf("update after node change: full %v globals %+v, want full with node ports on %v and pods", u.Full, u.Globals, want)
		}
		if m := u.Changes[0].After.Frontends[0].Masquerade; m != desired.MasqueradeNonPod {
			t.Errorf("masquerade = %v after the pod ranges are known, want non-pod", m)
		}
		before := len(f.v4.updates())
		f.OnNodeChange(node)
		pass(time.Second)
		if n := len(f.v4.updates()) - before; n != 0 {
			t.Errorf("%d updates for the same node again, want 0", n)
		}
	})
}

// TestServiceCIDRsTakeEffectByThemselves: W-34 does not occur.
func TestServiceCIDRsTakeEffectByThemselves(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.synced()
		synctest.Wait()
		time.Sleep(time.Second)
		f.OnServiceCIDRsChanged([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("fd00::/112")})
		synctest.Wait()
		if got := f.v4.last().Globals.ServiceCIDRs; len(got) != 1 || got[0].String() != "10.0.0.0/16" {
			t.Errorf("IPv4 CIDRs = %v, want 10.0.0.0/16", got)
		}
		if got := f.v6.last().Globals.ServiceCIDRs; len(got) != 1 || got[0].String() != "fd00::/112" {
			t.Errorf("IPv6 CIDRs = %v, want fd00::/112", got)
		}
	})
}

// TestASharedVIPHasOneOwnerWhateverTheOrder adds and deletes two Services with
// the same external IP in both orders.
func TestASharedVIPHasOneOwnerWhateverTheOrder(t *testing.T) {
	a := service("a", "10.0.0.1", proxiertest.ExternalIPs("192.0.2.9"))
	b := service("b", "10.0.0.2", proxiertest.ExternalIPs("192.0.2.9"))
	for name, order := range map[string][]*v1.Service{"smaller first": {a, b}, "larger first": {b, a}} {
		t.Run(name, func(t *testing.T) {
			run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
				f.synced()
				for _, s := range order {
					f.OnServiceAdd(s)
					pass(time.Second)
				}
				have := map[string]*desired.Service{}
				for _, u := range f.v4.updates() {
					for s := range u.Services() {
						have[s.Name.Name] = s
					}
				}
				if got := len(have["a"].Frontends); got != 2 {
					t.Errorf("a has %d frontends, want ClusterIP and external IP", got)
				}
				if got := len(have["b"].Frontends); got != 1 {
					t.Errorf("b has %d frontends, want its ClusterIP alone", got)
				}
				problems := f.Status().Problems
				if len(problems) != 1 || problems[0].Object != "Service test/b" || problems[0].Reason != changetracker.ReasonDuplicate {
					t.Errorf("problems = %+v, want one of b", problems)
				}
				f.OnServiceDelete(a)
				pass(time.Second)
				u := f.v4.last()
				if namesIn(u) != "b" || len(u.Changes[1].After.Frontends) != 2 {
					t.Errorf("update after a was deleted: %q, want b with the external IP", namesIn(u))
				}
				if problems := f.Status().Problems; len(problems) != 0 {
					t.Errorf("problems = %+v after a was deleted, want none", problems)
				}
			})
		})
	}
}

// TestRefusedExternalIPsFollowTheNode: pod ranges, and the node's addresses if they are
// denied, may arrive late and change. spec.externalIPs must not take the traffic of a pod or
// the node (CVE-2020-8554).
func TestRefusedExternalIPsFollowTheNode(t *testing.T) {
	frontends := func(updates []desired.Update) (kinds string) { // of the last one that is about Services
		for _, u := range updates {
			if len(u.Changes) > 0 {
				kinds = ""
			}
			for s := range u.Services() {
				for i := range s.Frontends {
					kinds += s.Frontends[i].Kind.String() + " "
				}
			}
		}
		return kinds
	}
	const pod, other = "10.244.1.5", "10.244.2.5"
	steps := []struct {
		ranges, addresses string
		refused           []string
		denied            []string // if addresses of the node are denied
	}{
		{"", "", nil, nil},
		{"10.244.1.0/24", "", []string{pod}, []string{pod}},
		{"10.244.2.0/24", other, []string{other}, []string{other}},
		{"10.244.0.0/16", pod, []string{pod, other}, []string{pod, other}},
		{"10.245.0.0/16", pod, nil, []string{pod}},
		{"10.245.0.0/16", other, nil, []string{other}},
		{"10.244.1.0/24", other, []string{pod}, []string{pod, other}},
		{"10.245.0.0/16", "192.0.2.1", nil, nil},
	}
	for _, deny := range []bool{false, true} {
		run(t, proxier.Config{DenyNodeExternalIPs: deny}, func(t *testing.T, f *fixture) {
			f.synced()
			two := func(s *v1.Service) {
				s.Spec.ExternalIPs = []string{pod, other}
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "more", Protocol: v1.ProtocolTCP, Port: 81})
			}
			f.OnServiceAdd(service("a", "10.0.0.1", two))
			for _, step := range steps {
				node, want := changetracker.Node{Name: "node-1"}, step.refused
				if deny {
					want = step.denied
				}
				if step.ranges != "" {
					node.PodCIDRs = []netip.Prefix{netip.MustParsePrefix(step.ranges)}
				}
				if step.addresses != "" {
					node.Addresses = []netip.Addr{netip.MustParseAddr(step.addresses)}
				}
				f.OnNodeChange(node)
				if err := f.Sync(t.Context()); err != nil {
					t.Fatal(err)
				}
				of := strings.Repeat("ClusterIP "+strings.Repeat("ExternalIP ", 2-len(want)), 2)
				if got := frontends(f.v4.updates()); got != of {
					t.Errorf("pods in %q, node at %q, deny %t: frontends %q, want %q", step.ranges, step.addresses, deny, got, of)
				}
				var refused []string
				for _, p := range f.Status().Problems {
					if p.Reason == changetracker.ReasonRefused && p.Object == "Service test/a" && p.Field == "spec.externalIPs" {
						refused = append(refused, p.Value)
					}
				}
				if slices.Sort(refused); !slices.Equal(refused, want) || f.ProblemCounts()[changetracker.ReasonRefused] != len(want) {
					t.Errorf("pods in %q, node at %q, deny %t: refused are %q, want %q", step.ranges, step.addresses, deny, refused, want)
				}
			}
		})
	}
}

// A policy that the engine does not have is a problem of its Service, and the Service works.
func TestPoliciesOfOtherEnginesAreProblems(t *testing.T) {
	wanted := changetracker.Random
	config := proxier.Config{Tracker: changetracker.ObjectOptions{DecorateService: func(p *changetracker.ServicePort, _ *v1.Service) { p.Balancing = wanted }}}
	run(t, config, func(t *testing.T, f *fixture) {
		f.synced()
		for i, step := range []struct {
			policy   changetracker.Balancing
			problems int
		}{
			{changetracker.Random, 0},
			{changetracker.LeastConnections, 1},
			{changetracker.LeastConnections, 1},
			{changetracker.SourceHash, 0},
			{changetracker.LeastConnections, 1},
			{changetracker.SourcePortHash, 0},
		} {
			wanted = step.policy
			f.OnServiceAdd(service("a", fmt.Sprintf("10.0.0.%d", i+1)))
			if err := f.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			problems := slices.DeleteFunc(f.Status().Problems, func(p changetracker.Problem) bool {
				return p.Reason != changetracker.ReasonUnsupported || p.Object != "Service test/a" || p.Value != "load balancing policy least-connections"
			})
			if len(problems) != step.problems || f.ProblemCounts()[changetracker.ReasonUnsupported] != step.problems {
				t.Errorf("step %d, policy %v: problems %v, want %d", i, step.policy, f.Status().Problems, step.problems)
			}
			updates := f.v4.updates()
			for s := range updates[len(updates)-1].Services() {
				if s.Port.Balancing != step.policy {
					t.Errorf("step %d: the engine got policy %v, want %v", i, s.Port.Balancing, step.policy)
				}
			}
		}
	})
}

// With Config.LeastConnections, somebody else follows that policy.
func TestLeastConnectionsByWeightsIsNoProblem(t *testing.T) {
	config := proxier.Config{LeastConnections: true}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.Balancing = changetracker.LeastConnections }
	run(t, config, func(t *testing.T, f *fixture) {
		f.synced()
		f.OnServiceAdd(service("a", "10.0.0.1"))
		if err := f.Sync(t.Context()); err != nil || len(f.Status().Problems) > 0 {
			t.Errorf("problems %v, %v; want none", f.Status().Problems, err)
		}
	})
}

// An engine without a fast path works, and the Services that ask for it have a problem.
func TestAFastPathThatIsNotThereIsAProblem(t *testing.T) {
	wanted := false
	config := proxier.Config{Tracker: changetracker.ObjectOptions{DecorateService: func(p *changetracker.ServicePort, _ *v1.Service) { p.FastPath = wanted }}}
	run(t, config, func(t *testing.T, f *fixture) {
		f.synced()
		for i, step := range []bool{false, true, true, false, true} {
			wanted = step
			f.OnServiceAdd(service("a", fmt.Sprintf("10.0.0.%d", i+1)))
			if err := f.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			want := 0
			if step {
				want = 1
			}
			problems := slices.DeleteFunc(f.Status().Problems, func(p changetracker.Problem) bool {
				return p.Reason != changetracker.ReasonUnsupported || p.Object != "Service test/a" || p.Value != "fast path"
			})
			if len(problems) != want || f.ProblemCounts()[changetracker.ReasonUnsupported] != want {
				t.Errorf("step %d: problems %v, want %d", i, f.Status().Problems, want)
			}
		}
	})
}

func TestImportantServicesComeFirst(t *testing.T) {
	config := proxier.Config{Important: []types.NamespacedName{{Namespace: "test", Name: "z"}}}
	run(t, config, func(t *testing.T, f *fixture) {
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.OnServiceAdd(service("z", "10.0.0.2"))
		api := service("kubernetes", "10.0.0.3")
		api.Namespace = "default"
		f.OnServiceAdd(api)
		f.synced()
		synctest.Wait()
		if got, want := namesIn(f.v4.last()), "kubernetes z a"; got != want {
			t.Errorf("order %q, want %q", got, want)
		}
	})
}

func TestCleanupReachesEveryEngine(t *testing.T) {
	v4, v6 := &fakeEngine{}, &fakeEngine{}
	p, err := proxier.New(proxier.Config{}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: v4, v1.IPv6Protocol: v6})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Cleanup(t.Context()); err != nil || v4.cleaned != 1 || v6.cleaned != 1 || v4.closed != 1 {
		t.Errorf("Cleanup = %v, cleaned %d and %d, closed %d", err, v4.cleaned, v6.cleaned, v4.closed)
	}
}

// TestTriggersOutliveAFailedSync: W-11 does not occur, whether the sync fails or a service port.
func TestTriggersOutliveAFailedSync(t *testing.T) {
	for what, fail := range map[string]func(desired.Update) (proxier.Result, error){
		"sync": func(desired.Update) (proxier.Result, error) { return proxier.Result{}, errors.New("broken") },
		"service port": func(u desired.Update) (r proxier.Result, err error) {
			for s := range u.Services() {
				r.Failed = append(r.Failed, &proxier.ServiceError{Name: s.Name, Err: errors.New("refused")})
			}
			return r, nil
		},
	} {
		t.Run(what, func(t *testing.T) {
			o := &observed{}
			runWith(t, proxier.Config{}, proxier.Deps{Observer: o}, func(t *testing.T, f *fixture) {
				f.OnServiceAdd(service("a", "10.0.0.1"))
				f.synced()
				pass(time.Second)
				f.v4.become(fail)
				s := slice("a", "10.1.0.1")
				trigger := time.Now()
				s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: trigger.Format(time.RFC3339Nano)}
				f.OnEndpointSliceAdd(s)
				pass(300 * time.Millisecond)
				f.v4.become(nil)
				pass(time.Minute)
				o.mustHaveTrigger(t, trigger)
			})
		})
	}
}

func (o *observed) mustHaveTrigger(t *testing.T, trigger time.Time) {
	t.Helper()
	var got []time.Time
	failures := 0
	for _, r := range o.reports {
		got = append(got, r.Triggers...)
		if r.Err != nil || len(r.Failures) > 0 {
			failures++
			if len(r.Triggers) != 0 {
				t.Errorf("a failed sync reports triggers %v, want none", r.Triggers)
			}
		}
	}
	if failures == 0 || len(got) != 1 || !got[0].Equal(trigger) {
		t.Errorf("%d failures, triggers %v, want %v once", failures, got, trigger)
	}
}
