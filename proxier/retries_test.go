package proxier_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier"
)

// refuse fails for some service ports.
func refuse(bad func(name string) bool) func(desired.Update) (proxier.Result, error) {
	return func(u desired.Update) (r proxier.Result, err error) {
		for s := range u.Services() {
			if bad(s.Name.Name) {
				r.Failed = append(r.Failed, &proxier.ServiceError{Name: s.Name, Err: errors.New("kernel says no")})
			}
		}
		return r, nil
	}
}

// RUN-15: a service port that fails once is tried again soon, however long another one has been failing.
func TestAFailureDelaysNoOther(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.v4.become(refuse(func(name string) bool { return name == "bad" }))
		f.OnServiceAdd(service("bad", "10.0.0.1"))
		f.OnServiceAdd(service("b", "10.0.0.2"))
		f.synced()
		pass(10 * time.Minute)
		var mu sync.Mutex // guards tries
		var tries []time.Time
		f.v4.become(func(u desired.Update) (proxier.Result, error) {
			mu.Lock()
			defer mu.Unlock()
			return refuse(func(name string) bool {
				if name == "b" {
					tries = append(tries, time.Now())
				}
				return name == "bad" || len(tries) == 1
			})(u)
		})
		f.OnServiceUpdate(nil, service("b", "10.0.0.2", portIs(81)))
		pass(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		if len(tries) != 2 || tries[1].Sub(tries[0]) > 200*time.Millisecond {
			t.Errorf("b was tried at %v, want twice within 200ms", tries)
		}
	})
}

// While others change, a service port that fails is in an Update only when it is due, with pauses
// that grow; one whose failure is terminal is in none until it changes.
func TestUpdatesHaveOnlyWhatIsDue(t *testing.T) {
	for _, terminal := range []bool{false, true} {
		run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
			f.v4.become(func(u desired.Update) (proxier.Result, error) {
				r, err := refuse(func(name string) bool { return name == "bad" })(u)
				for _, e := range r.Failed {
					e.Terminal = terminal
				}
				return r, err
			})
			f.OnServiceAdd(service("bad", "10.0.0.1"))
			f.OnServiceAdd(service("b", "10.0.0.2"))
			f.synced()
			pass(time.Second)
			before := len(f.v4.updates())
			for i := range 1200 { // two minutes
				f.OnServiceUpdate(nil, service("b", "10.0.0.2", portIs(uint16(100+i))))
				pass(100 * time.Millisecond)
			}
			tries, others := 0, 0
			for _, u := range f.v4.updates()[before:] {
				if names := namesIn(u); strings.Contains(names, "bad") {
					tries++
				} else {
					others++
				}
				if u.Full {
					t.Error("an Update is full")
				}
			}
			status := f.Status().Families[v1.IPv4Protocol]
			least, most := 5, 12 // pauses of 100 ms, 200 ms, … 30 s
			if terminal {
				least, most = 0, 0
			}
			if tries < least || tries > most || others < 1100 || len(status.Failed) != 1 || status.LastError != nil || time.Since(status.LastSuccess) > time.Second {
				t.Errorf("terminal %t: %d tries and %d other Updates, want %d to %d and all others; status %+v", terminal, tries, others, least, most, status)
			}
			f.v4.become(nil)
			f.OnServiceUpdate(nil, service("bad", "10.0.0.1", portIs(81)))
			pass(time.Second)
			if failed := f.Status().Families[v1.IPv4Protocol].Failed; len(failed) != 0 {
				t.Errorf("terminal %t: after a change %v, want none", terminal, failed)
			}
		})
	}
}

// RUN-16: a sync that fails as a whole is tried again with pauses that grow, and that events shorten to a
// second; a family that works does not wait for it.
func TestATotalFailureIsRetriedWithPauses(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.OnServiceAdd(service("b", "10.0.0.2"))
		f.synced()
		pass(time.Second)
		f.v4.become(func(desired.Update) (proxier.Result, error) { return proxier.Result{}, errors.New("ENOMEM") })
		f.OnServiceUpdate(nil, service("b", "10.0.0.2", portIs(81)))
		pass(10 * time.Minute)
		applies := func(do func()) (v4, v6 int) {
			v4, v6 = len(f.v4.updates()), len(f.v6.updates())
			do()
			return len(f.v4.updates()) - v4, len(f.v6.updates()) - v6
		}
		if n, _ := applies(func() { pass(time.Minute) }); n < 1 || n > 2 {
			t.Errorf("%d Applies in a quiet minute, want 1 or 2", n)
		}
		failing, working := applies(func() {
			for i := range 600 {
				f.OnServiceUpdate(nil, service("b", "10.0.0.2", portIs(uint16(100+i))))
				pass(100 * time.Millisecond)
			}
		})
		if failing < 30 || failing > 62 || working < 550 {
			t.Errorf("%d Applies with ten events a second, and %d of the family that works, want one a second, and ten", failing, working)
		}
		f.v4.become(nil)
		pass(time.Millisecond)
		f.OnServiceUpdate(nil, service("b", "10.0.0.2"))
		pass(2 * time.Second)
		if err := f.Status().Families[v1.IPv4Protocol].LastError; err != nil {
			t.Errorf("two seconds after an event: %v, want nil", err)
		}
		f.v4.become(func(desired.Update) (proxier.Result, error) { return proxier.Result{}, errors.New("ENOMEM") })
		f.OnServiceUpdate(nil, service("b", "10.0.0.2", portIs(81)))
		pass(10 * time.Minute)
		f.v4.become(nil)
		if err := f.Sync(t.Context()); err != nil { // which does not wait
			t.Errorf("Sync = %v, want nil", err)
		}
	})
}

// Whatever fails, a service port that its engine takes is programmed soon: within 200 ms after the
// engine begins to take it, if it failed once, and within its own pauses otherwise. Events never pause.
func TestWhateverFailsEachServicePortIsProgrammedInItsOwnTime(t *testing.T) {
	tried := 0
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 41))
		run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
			type state struct {
				refused  bool      // by the engine
				refusals int       // in a row
				last     time.Time // refusal
				has      uint16
			}
			var mu sync.Mutex // guards states, and r
			states := map[string]*state{}
			f.v4.become(func(u desired.Update) (result proxier.Result, err error) {
				mu.Lock()
				defer mu.Unlock()
				for s := range u.Services() {
					p := states[s.Name.Name]
					if p.refused {
						p.refusals++
						p.last = time.Now()
						result.Failed = append(result.Failed, &proxier.ServiceError{Name: s.Name, Err: errors.New("no"), Partial: r.IntN(2) == 0})
					} else {
						p.refusals, p.has = 0, s.Port.Port
					}
				}
				return result, nil
			})
			f.synced()
			ports := map[string]uint16{}
			for step := range 300 {
				mu.Lock()
				name := fmt.Sprintf("s%d", r.IntN(10))
				if states[name] == nil {
					states[name] = &state{}
				}
				switch p := states[name]; {
				case r.IntN(3) == 0:
					p.refused = !p.refused
				default:
					ports[name]++
					f.OnServiceUpdate(nil, service(name, "10.0.0."+name[1:], portIs(ports[name])))
				}
				wait := time.Duration(r.IntN(120)) * time.Millisecond
				mu.Unlock()
				pass(wait)
				mu.Lock()
				now := time.Now()
				for name, p := range states {
					pause := min(100*time.Millisecond<<max(p.refusals-1, 0), 30*time.Second) * 12 / 10
					if p.refusals > 0 && !p.refused && now.Sub(p.last) > pause+100*time.Millisecond {
						t.Fatalf("seed %d, step %d: %s was refused %d times, the last time %v ago, and is not tried again", seed, step, name, p.refusals, now.Sub(p.last))
					}
					if p.refusals > 0 {
						tried++
					}
				}
				mu.Unlock()
			}
			mu.Lock()
			for _, p := range states {
				p.refused = false
			}
			mu.Unlock()
			pass(time.Minute)
			mu.Lock()
			defer mu.Unlock()
			for name, p := range states {
				if p.has != ports[name] {
					t.Errorf("seed %d: in the end the engine has port %d of %s, want %d", seed, p.has, name, ports[name])
				}
			}
			if failed := f.Status().Families[v1.IPv4Protocol].Failed; len(failed) > 0 {
				t.Errorf("seed %d: in the end %v failed", seed, failed)
			}
		})
	}
	if tried < 1000 {
		t.Errorf("a service port was waiting only %d times", tried)
	}
}

// RUN-17: a day with a service port that always fails, and others that change: what alerts on kube-proxy's own
// metrics look at goes on. They fire if syncs fail, or if the last one is older than the last change.
func TestOneBadServicePortFiresNoAlert(t *testing.T) {
	registry := prometheus.NewRegistry()
	observer, err := metrics.New(registry, metrics.Options{Mode: "nftables"})
	if err != nil {
		t.Fatal(err)
	}
	value := func(name string) (value float64) {
		all, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range all {
			if family.GetName() == name {
				m := family.GetMetric()[0]
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
		t.Fatalf("no metric %s", name)
		return 0
	}
	const last, queued, failures = "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
		"kubeproxy_sync_proxy_rules_nftables_sync_failures_total"
	runWith(t, proxier.Config{}, proxier.Deps{Observer: observer}, func(t *testing.T, f *fixture) {
		observer.Watch(metrics.Sources{Status: f.Status})
		f.v4.become(refuse(func(name string) bool { return name == "bad" }))
		f.OnServiceAdd(service("bad", "10.0.0.1"))
		f.OnServiceAdd(service("b", "10.0.0.2"))
		f.synced()
		for i := range 24 * 6 {
			pass(10 * time.Minute)
			f.OnServiceUpdate(nil, service("b", "10.0.0.2", portIs(uint16(100+i))))
			pass(time.Second)
			if behind := value(queued) - value(last); behind > 1 || value(failures) > 0 {
				t.Fatalf("after %d changes: %v failures, the last sync is %vs older than the last change", i+1, value(failures), behind)
			}
		}
		if s := f.Status().Families[v1.IPv4Protocol]; !s.Synced || time.Since(s.LastSuccess) > 2*time.Second || len(s.Failed) != 1 {
			t.Errorf("status %+v, want a success just now, and one failure", s)
		}
		f.v4.become(func(desired.Update) (proxier.Result, error) { return proxier.Result{}, errors.New("ENOMEM") })
		f.OnServiceUpdate(nil, service("b", "10.0.0.2"))
		pass(time.Minute)
		if behind := value(queued) - value(last); behind < 0.9 || value(failures) < 5 {
			t.Errorf("everything fails: %v failures, the last sync is %vs older than the last change; want alerts", value(failures), behind)
		}
	})
}

// What fails for long costs little memory, also in the history.
func TestFailuresCostLittleMemory(t *testing.T) {
	const services, limit = 3_000, 10 << 20
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		heap := func() uint64 {
			var m runtime.MemStats
			runtime.GC()
			runtime.GC()
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		forget := func() {
			for _, e := range []*fakeEngine{f.v4, f.v6} {
				e.mu.Lock()
				e.seen = nil
				e.mu.Unlock()
			}
		}
		set := func(port uint16) {
			for i := range services {
				f.Tracker().Services.Update(nil, service(fmt.Sprintf("s%d", i), fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250), portIs(port)))
			}
		}
		set(80)
		f.synced()
		pass(time.Second)
		forget()
		before := heap()
		f.v4.become(func(u desired.Update) (r proxier.Result, err error) {
			forget()
			for s := range u.Services() {
				r.Failed = append(r.Failed, &proxier.ServiceError{Name: s.Name, Err: fmt.Errorf("add element of %v: %w", s.Name, errors.New("no space left on device"))})
			}
			return r, nil
		})
		set(99)
		f.Trigger()
		pass(10 * time.Minute)
		forget()
		if n := len(f.Status().Families[v1.IPv4Protocol].Failed); n != services {
			t.Errorf("%d failed, want all", n)
		}
		if after := heap(); after > before+limit {
			t.Errorf("%d service ports that fail for two hours cost %d MiB, want at most %d", services, (after-before)>>20, limit>>20)
		}
	})
}

// A count of service ports with no endpoint on this node is of what the engine has, not of what it refused.
func TestNoLocalCountsWhatIsProgrammed(t *testing.T) {
	run(t, proxier.Config{Node: changetracker.Node{Name: "here"}}, func(t *testing.T, f *fixture) {
		local := func(s *v1.Service) {
			policy := v1.ServiceInternalTrafficPolicyLocal
			s.Spec.InternalTrafficPolicy = &policy
		}
		f.OnServiceAdd(service("web", "10.0.0.1"))
		f.OnEndpointSliceAdd(slice("web", "10.1.0.1"))
		f.synced()
		pass(time.Second)
		f.v4.become(refuse(func(string) bool { return true }))
		f.OnServiceUpdate(nil, service("web", "10.0.0.1", local))
		pass(time.Second)
		if n := f.Status().Families[v1.IPv4Protocol].NoLocalInternal; n != 0 {
			t.Errorf("the engine refused policy Local, and NoLocalInternal is %d, want 0", n)
		}
		f.v4.become(nil)
		pass(time.Minute)
		if n := f.Status().Families[v1.IPv4Protocol].NoLocalInternal; n != 1 {
			t.Errorf("the engine has policy Local, and NoLocalInternal is %d, want 1", n)
		}
		f.OnServiceDelete(service("web", "10.0.0.1"))
		pass(time.Second)
		if n := f.Status().Families[v1.IPv4Protocol].NoLocalInternal; n != 0 {
			t.Errorf("the Service is gone, and NoLocalInternal is %d, want 0", n)
		}
	})
}

// Nobody but the Proxier consumes the changes of its tracker.
func TestOthersDoNotConsumeChanges(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.synced()
		pass(time.Second)
		own := f.Tracker()
		consume := func(changetracker.Delta) ([]changetracker.ServicePortName, error) { return nil, nil }
		own.Services.Update(nil, service("a", "10.0.0.1"))
		source := own.Source("west")
		for _, apply := range []func(v1.IPFamily, func(changetracker.Delta) ([]changetracker.ServicePortName, error)) error{
			own.Apply, own.Services.Apply, own.Endpoints.Apply, source.Services.Apply, source.Endpoints.Apply,
		} {
			if err := apply(v1.IPv4Protocol, consume); !errors.Is(err, changetracker.ErrLent) {
				t.Errorf("Apply = %v, want ErrLent", err)
			}
		}
		f.Trigger()
		pass(time.Second)
		if u := f.v4.last(); namesIn(u) != "a" {
			t.Errorf("the last Update has %q, want a", namesIn(u))
		}
	})
}

// BenchmarkOneChangeBesideFailing measures a sync with one change while other service ports fail.
func BenchmarkOneChangeBesideFailing(b *testing.B) {
	for _, failing := range []int{0, 100, 10_000} {
		b.Run(fmt.Sprintf("failing=%d", failing), func(b *testing.B) {
			engine := &fakeEngine{}
			retry := withoutRetries()
			retry.Families = []v1.IPFamily{v1.IPv4Protocol}
			p, err := proxier.New(retry, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
			if err != nil {
				b.Fatal(err)
			}
			engine.become(func(u desired.Update) (proxier.Result, error) {
				engine.mu.Lock()
				engine.seen = nil
				engine.mu.Unlock()
				return refuse(func(name string) bool { return strings.HasPrefix(name, "bad") })(u)
			})
			for i := range failing {
				p.OnServiceAdd(service(fmt.Sprintf("bad%d", i), fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250)))
			}
			p.OnServiceSynced()
			p.OnEndpointSlicesSynced()
			if err := p.SyncNow(b.Context()); err != nil {
				b.Fatal(err)
			}
			port := uint16(0)
			for b.Loop() {
				port = port%60_000 + 1
				p.OnServiceUpdate(nil, service("web", "10.0.0.1", portIs(port)))
				if err := p.SyncNow(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			if failed := p.Status().Families[v1.IPv4Protocol].Failed; len(failed) != failing {
				b.Fatalf("%d failed, want %d", len(failed), failing)
			}
		})
	}
}
