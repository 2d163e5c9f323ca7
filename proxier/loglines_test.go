package proxier_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// logged runs a Proxier whose log lines are kept. lines returns the new ones of IPv4 or of no
// family, as "level message service".
func logged(t *testing.T, test func(t *testing.T, f *fixture, lines func() []string)) {
	t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	config := proxier.Config{Runner: runner.Options{Retry: runner.Backoff{Initial: time.Second, Max: time.Second}}}
	runWith(t, config, proxier.Deps{Logger: zap.New(core)}, func(t *testing.T, f *fixture) {
		test(t, f, func() (lines []string) {
			for _, entry := range logs.TakeAll() {
				fields := entry.ContextMap()
				line := entry.Level.String() + " " + entry.Message
				if service, ok := fields["service"]; ok {
					line += " " + fmt.Sprint(service)
				}
				if fields["family"] != "IPv6" {
					lines = append(lines, line)
				}
			}
			slices.Sort(lines)
			return lines
		})
	})
}

// serviceName is the name of a port of service.
func serviceName(name string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: name}, Port: "web", Protocol: v1.ProtocolTCP}
}

func mustLog(t *testing.T, when string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: logged %q, want %q", when, got, want)
	}
}

const (
	lineFirst   = "info the first sync is done"
	lineFailed  = "warn sync failed, will be retried"
	lineSucceed = "info sync succeeded after failures"
	lineWorse   = "warn service port is not programmed as it should be, will be retried"
	lineBetter  = "info service port does not fail any more"
	lineDamage  = "warn another program changed our kernel objects"
	lineRepair  = "info kernel objects are repaired after another program changed them"
)

// The first sync is logged once, after failures too, and never again.
func TestTheFirstSyncIsLoggedOnce(t *testing.T) {
	logged(t, func(t *testing.T, f *fixture, lines func() []string) {
		f.v4.failWith(func(desired.Update) error { return errors.New("no kernel") })
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.synced()
		pass(time.Minute)
		mustLog(t, "while it fails", lines(), lineFailed)
		f.v4.failWith(nil)
		pass(time.Minute)
		mustLog(t, "when it succeeds", lines(), lineSucceed, lineFirst)
		f.OnServiceAdd(service("b", "10.0.0.2"))
		pass(2 * time.Hour) // full syncs
		mustLog(t, "later", lines())
	})
}

// A sync that fails is logged once for each reason, however often it is tried again.
func TestASyncThatFailsIsLoggedOnce(t *testing.T) {
	logged(t, func(t *testing.T, f *fixture, lines func() []string) {
		f.synced()
		pass(time.Second)
		mustLog(t, "at first", lines(), lineFirst)
		for _, reason := range []string{"no memory", "no permission"} {
			f.v4.failWith(func(desired.Update) error { return errors.New(reason) })
			f.Trigger()
			before := len(f.v4.updates())
			pass(time.Minute)
			mustLog(t, reason, lines(), lineFailed)
			if n := len(f.v4.updates()) - before; n < 10 {
				t.Fatalf("%d syncs, want many", n)
			}
		}
		f.v4.failWith(nil)
		pass(time.Minute)
		mustLog(t, "after it", lines(), lineSucceed)
	})
}

// TestAStopDuringASyncIsNoFailure: nothing will be retried.
func TestAStopDuringASyncIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.WarnLevel)
		f := newFixture(t, proxier.Config{}, proxier.Deps{Logger: zap.New(core)})
		ctx, stop := context.WithCancel(t.Context())
		f.v4.failWith(func(desired.Update) error {
			stop()
			return ctx.Err()
		})
		f.synced()
		if err := f.Run(ctx); err != nil || logs.Len() > 0 {
			t.Errorf("Run = %v, logged %v, want nil and nothing", err, logs.All())
		}
	})
}

// A service port that fails is logged once, and once more when it no longer fails.
func TestAServiceThatFailsIsLoggedOnce(t *testing.T) {
	logged(t, func(t *testing.T, f *fixture, lines func() []string) {
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.OnServiceAdd(service("b", "10.0.0.2"))
		f.synced()
		pass(time.Second)
		lines()
		fail := func(reasons map[string]string) {
			f.v4.failWith(func(u desired.Update) error {
				var failed someError
				for s := range u.Services() {
					if reason, ok := reasons[s.Name.Name]; ok {
						failed = append(failed, &proxier.ServiceError{Name: s.Name, Err: errors.New(reason)})
					}
				}
				return failed
			})
			f.OnServiceUpdate(service("a", "10.0.0.1"), service("a", "10.0.0.3"))
			f.OnServiceUpdate(service("b", "10.0.0.2"), service("b", "10.0.0.4"))
			pass(time.Minute)
		}
		fail(map[string]string{"a": "port taken", "b": "port taken"})
		mustLog(t, "both fail", lines(), lineWorse+" test/a:web", lineWorse+" test/b:web")
		fail(map[string]string{"a": "port taken", "b": "another reason"})
		mustLog(t, "another reason", lines(), lineWorse+" test/b:web")
		fail(map[string]string{"a": "port taken"})
		mustLog(t, "one does not fail any more", lines(), lineBetter+" test/b:web")
		fail(nil)
		mustLog(t, "none fails", lines(), lineBetter+" test/a:web")
	})
}

// TestManyServicesThatFailAreCounted: their lines have a bound.
func TestManyServicesThatFailAreCounted(t *testing.T) {
	logged(t, func(t *testing.T, f *fixture, lines func() []string) {
		for n := range 100 {
			f.OnServiceAdd(service(fmt.Sprintf("s-%d", n), fmt.Sprintf("10.0.1.%d", n)))
		}
		f.v4.failWith(func(u desired.Update) error {
			var failed someError
			for s := range u.Services() {
				failed = append(failed, &proxier.ServiceError{Name: s.Name, Err: errors.New("refused")})
			}
			return failed
		})
		f.synced()
		pass(time.Minute)
		if got := lines(); len(got) != 22 || !slices.Contains(got, "warn further service ports fail, or do not any more: see Status.Failed") {
			t.Errorf("%d lines: %q, want 20 service ports, how many more, and the first sync", len(got), got)
		}
	})
}

// A burst of damage is logged once, and so is its repair.
func TestABurstOfDamageIsLoggedOnce(t *testing.T) {
	logged(t, func(t *testing.T, f *fixture, lines func() []string) {
		f.synced()
		pass(time.Second)
		lines()
		for range 2 {
			for range 30 {
				f.v4.damage(proxier.Damage{Object: "chain services", By: "nft (process 1)"})
				pass(time.Second)
			}
			mustLog(t, "a burst", lines(), lineRepair, lineDamage)
			pass(time.Hour)
		}
		mustLog(t, "afterwards", lines())
	})
}

// A burst of damage to a service port is logged once, with the program that did it, and so is its repair, also if
// the repair fails at first.
func TestABurstOfDamageToAServicePortIsLoggedOnce(t *testing.T) {
	const (
		lineHit  = "warn service port was damaged, will be programmed again test/a:web"
		lineMend = "info service port is repaired after it was damaged test/a:web"
	)
	logged(t, func(t *testing.T, f *fixture, lines func() []string) {
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.OnServiceAdd(service("b", "10.0.0.2"))
		f.synced()
		pass(time.Second)
		lines()
		hit := proxier.Damage{Object: "virtual server", By: "ipvsadm (process 1)", Service: serviceName("a")}
		for range 2 {
			for range 30 {
				f.v4.damage(hit)
				f.v4.damage(hit)
				pass(time.Second)
			}
			mustLog(t, "a burst", lines(), lineMend, lineHit)
			pass(time.Hour)
		}
		mustLog(t, "afterwards", lines())
		f.v4.failWith(func(desired.Update) error { return errors.New("no kernel") })
		f.v4.damage(hit)
		pass(time.Minute)
		mustLog(t, "while the repair fails", lines(), lineHit, lineFailed)
		f.v4.failWith(nil)
		pass(time.Minute)
		mustLog(t, "when it succeeds", lines(), lineMend, lineSucceed)
	})
}

// TestManyDamagedServicePortsAreCounted: their lines have a bound.
func TestManyDamagedServicePortsAreCounted(t *testing.T) {
	logged(t, func(t *testing.T, f *fixture, lines func() []string) {
		f.synced()
		pass(time.Second)
		lines()
		for n := range 100 {
			f.v4.damage(proxier.Damage{Object: "virtual server", Service: serviceName(fmt.Sprint("s-", n))})
		}
		pass(time.Second)
		if got := lines(); len(got) != 41 || !slices.Contains(got, "warn further service ports were damaged, will be programmed again") {
			t.Errorf("%d lines: %q, want 20 service ports that were damaged and repaired, and that there are more", len(got), got)
		}
	})
}
