package endpointhealth_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// With the defaults, an endpoint that stops answering, by refusing or by silence, is ejected within three
// intervals, and returns when it answers again (EHC-01).
func TestThreeIntervals(t *testing.T) {
	const interval = 10 * time.Second
	for _, failure := range []error{errSick, errHangs} {
		t.Run(failure.Error(), func(t *testing.T) {
			inBubble(t, endpointhealth.CheckPolicy{}, 3, func(k *kit) {
				k.run()
				k.after(5 * time.Minute)
				for range 5 {
					k.breaks(at(2), failure)
					if took := k.until(4*interval, at(2)+" ejected"); took > 3*interval {
						t.Errorf("ejected after %v, want at most %v", took, 3*interval)
					}
					k.breaks(at(2), nil)
					k.until(10*time.Minute, at(2))
					time.Sleep(time.Hour)
				}
				if s := k.checker.Status(); s.Ejections != 5 || s.Returns != 5 || s.Failing != 0 || s.Endpoints != 3 || len(s.Unusual) != 0 {
					t.Errorf("status %+v", s)
				}
				k.expectLog(slices.Repeat([]string{"endpoint ejected " + at(2), "endpoint returned " + at(2)}, 5)...)
			})
		})
	}
}

// Only failures in a row count, and only successes in a row (EHC-02).
func TestThresholds(t *testing.T) {
	policy := endpointhealth.CheckPolicy{Failures: 3, Successes: 4, EjectFor: time.Second, MaxEjectFor: time.Second}
	inBubble(t, policy, 3, func(k *kit) {
		k.run()
		k.after(time.Minute)
		count := func() int { return len(k.checks()[at(1)]) }
		fail := func(err error, checks int) {
			k.breaks(at(1), err)
			count()
			for n := 0; n < checks; n += count() {
				k.after(100*time.Millisecond, k.unusual()...)
			}
		}
		for range 5 {
			fail(errSick, 2)
			fail(nil, 1)
		}
		k.after(time.Second) // two failures, then a success
		fail(errSick, 3)
		k.after(2*time.Second, at(1)+" ejected")
		for range 5 {
			fail(nil, 3)
			fail(errSick, 1)
		}
		k.after(2*time.Second, at(1)+" ejected") // three successes, then a failure
		fail(nil, 4)
		k.after(2 * time.Second)
	})
}

// The intervals vary within their bounds and are not all alike, and the first checks are spread (EHC-03).
func TestJitter(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{Interval: time.Minute, Jitter: 0.3}, 100, func(k *kit) {
		began := time.Now()
		k.run()
		k.after(30 * time.Second)
		if early := len(k.checks()); early < 25 || early > 75 {
			t.Errorf("%d of 100 endpoints are checked in the first half of the first interval", early)
		}
		k.after(time.Hour)
		seen := map[time.Duration]bool{}
		checks := k.checks()
		for at, times := range checks {
			for i := 1; i < len(times); i++ {
				wait := times[i].Sub(times[i-1])
				if wait < 42*time.Second || wait > 78*time.Second {
					t.Errorf("%s: %v between two checks, want 42s to 78s", at, wait)
				}
				seen[wait.Round(time.Second)] = true
			}
			if times[0].Sub(began) > 2*time.Minute || len(times) < 50 {
				t.Errorf("%s: %d checks, the first after %v", at, len(times), times[0].Sub(began))
			}
		}
		if len(checks) != 100 || len(seen) < 30 {
			t.Errorf("%d endpoints, %d different intervals, want 100 and about 36", len(checks), len(seen))
		}
	})
}

// At most the share is ejected, never the last endpoint, and first those that have failed first (EHC-04). When one
// is well again, another one takes its place.
func TestShare(t *testing.T) {
	for _, c := range []struct {
		endpoints, want int
		share           float64
	}{{1, 0, 0}, {2, 1, 0}, {3, 1, 0}, {4, 2, 0}, {10, 3, 0.3}, {10, 9, 1}, {1, 0, 1}, {5, 0, 0.1}} {
		t.Run(fmt.Sprintf("%d of %d by %v", c.want, c.endpoints, c.share), func(t *testing.T) {
			inBubble(t, endpointhealth.CheckPolicy{MaxEjected: c.share}, c.endpoints, func(k *kit) {
				k.run()
				k.after(time.Minute)
				for i := range c.endpoints {
					k.breaks(at(i+1), errSick)
				}
				time.Sleep(10 * time.Minute)
				if got := k.unusual(); len(got) != c.want {
					t.Errorf("%q, want %d", got, c.want)
				}
				s := k.checker.Status()
				if s.Failing != c.endpoints || s.Ejected != c.want || s.Kept != c.endpoints-c.want || int(s.Ejections) != c.want || s.Returns != 0 {
					t.Errorf("status %+v: none may take turns", s)
				}
				for i := range c.endpoints {
					k.breaks(at(i+1), nil)
				}
				k.after(10 * time.Minute)
			})
		})
	}
}

// TestTheFirstToFailGoes: among more failing endpoints than the share, those that failed first
// are ejected; one that is well again gives its place to another.
func TestTheFirstToFailGoes(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{}, 4, func(k *kit) {
		k.run()
		k.after(time.Minute)
		for _, i := range []int{3, 2, 4, 1} {
			k.breaks(at(i), errSick)
			time.Sleep(time.Minute)
		}
		k.after(time.Minute, at(2)+" ejected", at(3)+" ejected")
		k.breaks(at(3), nil)
		k.after(time.Minute, at(2)+" ejected", at(4)+" ejected")
	})
}

// TestNobodyTakesTurns: an endpoint that is ejected stays so, although the service port gets
// another one that has failed for longer, for another service port.
func TestNobodyTakesTurns(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{MaxEjected: 0.34}, 3, func(k *kit) {
		k.service("a")
		k.endpoints("a", 4)
		k.run()
		k.after(time.Minute)
		k.breaks(at(4), errSick)
		k.after(time.Minute)
		k.breaks(at(2), errSick)
		k.after(time.Minute, at(2)+" ejected")
		k.endpoints("web", 4)
		k.after(time.Minute, at(2)+" ejected")
	})
}

// The share and the last endpoint count in each list that frontends use (EHC-05): with traffic policy Local, the
// last endpoint of the node stays.
func TestScopes(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{}, 0, func(k *kit) {
		k.service("web", proxiertest.InternalPolicyLocal())
		k.tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice("default", "web", "IPv4", proxiertest.SlicePort("http", v1.ProtocolTCP, 80),
			proxiertest.Endpoint("10.0.0.1", proxiertest.OnNode("here")), proxiertest.Endpoint("10.0.0.2", proxiertest.OnNode("there")),
			proxiertest.Endpoint("10.0.0.3", proxiertest.OnNode("there"))), false)
		k.sync()
		k.breaks(at(1), errSick)
		k.breaks(at(2), errSick)
		k.run()
		k.after(time.Hour)
		if checks := k.checks(); len(checks) != 1 || len(checks[at(1)]) == 0 {
			t.Errorf("checks of %v, want only the endpoint that the node may use", checks)
		}
		k.service("web") // traffic policy Cluster
		k.sync()
		k.after(time.Hour, at(1)+" ejected")
	})
}

// An endpoint of several service ports is checked once, and ejected from all (EHC-06).
func TestSharedChecks(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{}, 3, func(k *kit) {
		for _, other := range []string{"a", "bb", "cccc"} {
			k.service(other)
			k.endpoints(other, 3)
		}
		k.run()
		k.after(1000 * time.Second)
		for at, times := range k.checks() {
			if len(times) < 90 || len(times) > 112 {
				t.Errorf("%s: %d checks in 100 intervals", at, len(times))
			}
		}
		before := k.syncs()
		k.breaks(at(2), errSick)
		k.after(time.Minute, at(2)+" ejected")
		if s := k.checker.Status(); s.Endpoints != 3 || s.Failing != 1 || s.Ejected != 4 || k.syncs() != before+1 {
			t.Errorf("%d syncs, status %+v; want one sync for the ejection from four service ports", k.syncs()-before, s)
		}
	})
}

// What is decided at about the same time is one sync, and syncs keep their distance (EHC-07).
func TestOneSync(t *testing.T) {
	const n = 200
	inBubble(t, endpointhealth.CheckPolicy{Interval: 10 * time.Second}, n, func(k *kit) {
		k.run()
		k.after(time.Minute)
		for i := range n / 2 {
			k.breaks(at(i+1), errSick)
		}
		time.Sleep(time.Minute)
		if s := k.checker.Status(); s.Ejected != n/2 || k.syncs() > 30 {
			t.Errorf("%d ejected by %d syncs, want %d by at most 30", s.Ejected, k.syncs(), n/2)
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		for i := 1; i < len(k.triggers); i++ {
			if d := k.triggers[i].Sub(k.triggers[i-1]); d < time.Second {
				t.Errorf("syncs follow each other after %v, want 1s or more", d)
			}
		}
	})
}

// The ejections of an endpoint that comes and goes last longer and longer, so that its changes are few (EHC-08).
// After a calm time they are short again.
func TestFlapping(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{}, 3, func(k *kit) {
		k.run()
		k.after(time.Minute)
		k.logs.TakeAll()
		for began := time.Now(); time.Since(began) < 2*time.Hour; {
			k.breaks(at(1), errSick)
			time.Sleep(25 * time.Second)
			k.breaks(at(1), nil)
			time.Sleep(25 * time.Second)
		}
		// 30s, 1m, 2m, 4m, then 5m each, with the time between.
		if s := k.checker.Status(); s.Ejections < 8 || s.Ejections > 28 || s.Syncs > 56 {
			t.Errorf("%+v in two hours of flapping, want at most 28 ejections", s)
		}
		k.breaks(at(1), nil)
		k.after(2 * time.Hour)
		k.breaks(at(1), errSick)
		k.until(time.Minute, at(1)+" ejected")
		k.breaks(at(1), nil)
		if took := k.until(10*time.Minute, at(1)); took < 29*time.Second || took > time.Minute {
			t.Errorf("after two calm hours, the ejection lasts %v, want 30s to 1m", took)
		}
	})
}

// When Run ends, all endpoints are as slices say (EHC-10).
func TestTheEndRemovesOverrides(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{SlowStart: time.Hour}, 4, func(k *kit) {
		k.run()
		k.after(time.Minute)
		k.breaks(at(1), errHangs)
		k.breaks(at(2), errSick)
		k.after(time.Minute, at(1)+" ejected", at(2)+" ejected")
		k.breaks(at(2), nil)
		k.until(10*time.Minute, at(4)+" weight=4")
		k.stop()
		k.after(0)
		if err := k.checker.Run(t.Context(), k.plane); err == nil || !strings.Contains(err.Error(), "called twice") {
			t.Errorf("second Run: %v", err)
		}
	})
}

// What this process lacks is no failure of an endpoint, nor is a Probe that panics (EHC-11).
func TestFaultsOfTheNode(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{}, 3, func(k *kit) {
		k.breaks(at(1), fmt.Errorf("connect: %w", syscall.EMFILE))
		k.run()
		k.after(time.Hour)
		if s := k.checker.Status(); s.Untested < 300 || s.Failures != 0 {
			t.Errorf("status %+v", s)
		}
	})
	calls := 0
	probe := endpointhealth.Func(func(context.Context, endpointhealth.Target) error {
		calls++
		panic("a bug")
	})
	inBubble(t, endpointhealth.CheckPolicy{Probe: probe}, 1, func(k *kit) {
		k.run()
		k.after(time.Minute)
		if calls == 0 || k.checker.Status().Untested == 0 {
			t.Errorf("%d calls, %+v", calls, k.checker.Status())
		}
	})
}

// TestConcurrency: no more checks run at once than the option lets one namespace have, and all get their turn.
func TestConcurrency(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{Timeout: 10 * time.Second}, 100, func(k *kit) {
		k.options.Concurrency = 7
		k.takes = time.Second
		k.run()
		k.after(10 * time.Minute)
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.most != 4 || len(k.checked) != 100 {
			t.Errorf("%d checks at once of %d endpoints, want the half of 7 for one namespace, of 100", k.most, len(k.checked))
		}
		if s := k.checker.Status(); s.Late == 0 || s.Failures != 0 {
			t.Errorf("status %+v, want late checks", s)
		}
	})
}

// Whatever a tenant's Services ask for, and however long their endpoints do not answer, the checks of another
// tenant come in time, and no more begin than Options.Rate says (EHC-12).
func TestOneNamespaceDoesNotTakeAllChecks(t *testing.T) {
	for title, takes := range map[string]time.Duration{"fast": time.Millisecond, "hanging": time.Hour} {
		t.Run(title, func(t *testing.T) {
			policy := endpointhealth.CheckPolicy{Interval: 10 * time.Second}
			inBubble(t, policy, 10, func(k *kit) {
				k.options.Rate, k.options.Concurrency = 200, 20
				greedy := &plane{broken: map[string]error{}, checked: map[string][]time.Time{}, takes: takes}
				k.options.Choose = func(p *changetracker.ServicePort) (endpointhealth.CheckPolicy, bool, error) {
					if p.Name.Namespace == "greedy" {
						return endpointhealth.CheckPolicy{Probe: greedy, Interval: 10 * time.Millisecond, Timeout: 10 * time.Millisecond}, true, nil
					}
					policy.Probe = k.plane
					return policy, true, nil
				}
				for n := range 60 {
					name := fmt.Sprint("web-", n)
					k.tracker.Services.Update(nil, proxiertest.Service("greedy", name, proxiertest.ClusterIPs(fmt.Sprint("10.97.0.", 1+n)), proxiertest.Port("http", v1.ProtocolTCP, 80)))
					parts := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, 80)}
					for i := range 20 {
						parts = append(parts, proxiertest.Endpoint(fmt.Sprintf("10.9.%d.%d", n, 1+i)))
					}
					k.tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice("greedy", name, discovery.AddressTypeIPv4, parts...), false)
				}
				k.sync()
				k.run()
				const minutes = 5
				k.after(minutes * time.Minute)
				for at, times := range k.checks() {
					if len(times) < 6*minutes-3 { // the first comes within 10 s, and intervals vary by a tenth
						t.Errorf("%s: %d checks in %d minutes, want one in 10 s", at, len(times), minutes)
					}
				}
				if n := k.checker.Status().Checks; n > 200*60*minutes+20 {
					t.Errorf("%d checks in %d minutes, want at most 200 a second", n, minutes)
				}
			})
		})
	}
}

// One Service has a share of the checks: its endpoints are checked less often, all equally (EHC-13).
func TestOneServiceHasAShareOfTheChecks(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{Interval: time.Second}, 200, func(k *kit) {
		k.options.Rate = 100 // ten for the Service
		k.run()
		k.after(10 * time.Minute)
		all := 0
		for at, times := range k.checks() {
			if all += len(times); len(times) < 24 || len(times) > 36 {
				t.Errorf("%s: %d checks in 10 minutes, want one in 20 s", at, len(times))
			}
		}
		if all > 6300 {
			t.Errorf("%d checks in 10 minutes, want ten a second", all)
		}
	})
}

// TestEndpointsComeAndGo: new endpoints are checked, those that are gone are not, and one that
// was ejected, went and came back while it fails is ejected again.
func TestEndpointsComeAndGo(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{}, 2, func(k *kit) {
		k.run()
		k.after(time.Minute)
		k.endpoints("web", 4)
		k.breaks(at(4), errSick)
		k.after(time.Minute, at(4)+" ejected")
		k.endpoints("web", 3)
		k.endpoints("web", 4) // within one Pause
		k.after(2*time.Second, at(4)+" ejected")
		k.endpoints("web", 3)
		k.after(time.Minute)
		k.checks()
		k.after(time.Minute)
		if checks := k.checks(); len(checks) != 3 || k.checker.Status().Endpoints != 3 {
			t.Errorf("checks of %v", checks)
		}
		k.tracker.Services.Delete(webName().NamespacedName)
		k.sync()
		k.after(time.Minute)
		if s := k.checker.Status(); s.Endpoints != 0 || s.Failing != 0 {
			t.Errorf("status %+v without Services", s)
		}
	})
}

// TestChoose: only chosen service ports are checked, each is asked for once, and a Policy that
// is invalid is logged once, as is an error and a panic.
func TestChoose(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{}, 2, func(k *kit) {
		asked := 0
		k.options.Choose = func(p *changetracker.ServicePort) (endpointhealth.CheckPolicy, bool, error) {
			asked++
			switch p.Name.Name {
			case "web":
				return endpointhealth.CheckPolicy{}, false, nil
			case "a":
				return endpointhealth.CheckPolicy{Probe: k.plane, Timeout: time.Hour}, true, nil
			case "c":
				return endpointhealth.CheckPolicy{Probe: k.plane}, true, errSick
			case "bb":
				panic("a bug")
			}
			return endpointhealth.CheckPolicy{Probe: endpointhealth.TCPProbe{}}, true, nil
		}
		for _, other := range []string{"a", "bb", "c"} {
			k.service(other)
			k.endpoints(other, 2)
		}
		k.run()
		for i := range 10 {
			k.endpoints("web", 2+i)
			k.after(time.Minute)
		}
		if s := k.checker.Status(); asked != 4 || s.Refused != 3 || s.Endpoints != 0 || len(k.checks()) != 0 {
			t.Errorf("asked %d times, status %+v", asked, s)
		}
		if lines := k.logs.TakeAll(); len(lines) != 3 {
			t.Errorf("log %v", lines)
		}
	})
}

// TestValidate: errors name each field that is wrong.
func TestValidate(t *testing.T) {
	if _, err := endpointhealth.New(endpointhealth.Options{Concurrency: -1, Rate: -1, Pause: -1}); err == nil ||
		!strings.Contains(err.Error(), "Choose: nil: want a function") || !strings.Contains(err.Error(), "Concurrency: -1") || !strings.Contains(err.Error(), "Rate: -1") || !strings.Contains(err.Error(), "Pause: -1ns") {
		t.Errorf("New: %v", err)
	}
	type uncomparable struct {
		endpointhealth.Probe
		list []int
	}
	for field, p := range map[string]endpointhealth.CheckPolicy{
		"Probe": {Probe: uncomparable{list: nil}}, "Interval": {Interval: time.Millisecond, Timeout: time.Millisecond},
		"Timeout": {Timeout: time.Minute}, "Jitter": {Jitter: 1}, "Failures": {Failures: -1}, "Successes": {Successes: -1},
		"PassiveFailures": {PassiveFailures: -1}, "EjectFor": {EjectFor: 2 * time.Minute, MaxEjectFor: time.Minute},
		"MaxEjected": {MaxEjected: 1.1}, "SlowStart": {SlowStart: -1}, "SlowStartSteps": {SlowStartSteps: 33},
	} {
		if err := p.Validate(); err == nil || !strings.HasPrefix(err.Error(), field+": ") || len(unwrap(err)) != 1 {
			t.Errorf("%s: %v", field, err)
		}
	}
	if err := (endpointhealth.CheckPolicy{}).Validate(); err != nil {
		t.Error(err)
	}
}

func unwrap(err error) []error {
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) {
		return nil
	}
	return joined.Unwrap()
}
