package proxier_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// applyTakes is how long an Update takes that has a part of a change.
const applyTakes = 30 * time.Millisecond

// slowly is an Apply that takes applyTakes.
func slowly(desired.Update) (proxier.Result, error) {
	time.Sleep(applyTakes)
	return proxier.Result{}, nil
}

// inParts calls test with a Proxier that runs, and has done its first sync. Its engines take parts of 10 service ports.
func inParts(t *testing.T, config proxier.Config, deps proxier.Deps, test func(t *testing.T, f *fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newFixtureWith(t, config, deps, &fakeEngine{part: 10}, &fakeEngine{part: 10})
		f.run(t, func(t *testing.T, f *fixture) {
			f.OnVersion(changetracker.InputServices, "1")
			f.synced()
			pass(time.Minute)
			f.v4.become(slowly)
			f.v6.become(slowly)
			test(t, f)
		})
	})
}

// manyServices adds Services to a namespace, with numbers.
func (f *fixture) manyServices(namespace string, first, count int, options ...proxiertest.ServiceOption) {
	for i := first; i < first+count; i++ {
		f.OnServiceAdd(proxiertest.Service(namespace, strconv.Itoa(i), append([]proxiertest.ServiceOption{
			proxiertest.ClusterIPs(fmt.Sprintf("10.0.%d.%d", i>>8, i&255)), proxiertest.Port("web", v1.ProtocolTCP, 80),
		}, options...)...))
	}
}

func hasFrom(u desired.Update, namespace string) bool {
	return slices.ContainsFunc(u.Changes, func(c desired.Change) bool { return c.Name.Namespace == namespace })
}

// TestASmallChangePasses: a change of one namespace that comes while a large one of another is applied is in the next
// Update. The parts follow each other without a pause. Meanwhile nothing counts as applied that is not, and
// nothing is wrong.
func TestASmallChangePasses(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	inParts(t, proxier.Config{}, proxier.Deps{Logger: zap.New(core)}, func(t *testing.T, f *fixture) {
		began := time.Now()
		f.manyServices("big", 0, 250)
		f.OnVersion(changetracker.InputServices, "2")
		pass(100 * time.Millisecond) // during the fourth part
		f.OnServiceAdd(service("small", "10.1.0.1"))
		f.OnServiceAdd(service("six", "fd00::6"))
		arrived := time.Now()
		s := f.Status().Families[v1.IPv4Protocol]
		if !s.PendingSince.Equal(began) || !s.StaleSince.Equal(began) || s.Versions.Services != "1" || s.LastError != nil || len(s.Failed) > 0 || s.ServicePorts < 20 || s.ServicePorts > 40 {
			t.Errorf("the status during the parts is %+v, want it to be that of three parts", s)
		}
		if c := f.Status(); len(c.Conditions)+len(c.Problems) > 0 {
			t.Errorf("conditions %v, problems %v during the parts, want none", c.Conditions, c.Problems)
		}
		had := len(f.v4.updates())
		pass(applyTakes)
		if all := f.v4.updates(); len(all) != had+1 || !hasFrom(all[had], "test") {
			t.Errorf("%v later there are %d Updates more, want one with the small change", time.Since(arrived), len(all)-had)
		}
		if all := f.v6.updates(); len(all) == 0 || !hasFrom(all[len(all)-1], "test") {
			t.Errorf("%v later the other family does not have it", time.Since(arrived))
		}
		pass(time.Second)
		updates := f.v4.updates()[1:]
		for i, u := range updates {
			if u.Full || len(u.Changes) == 0 || len(u.Changes) > 11 {
				t.Errorf("Update %d has %d changes, full: %v, want at most the part and the oldest", i, len(u.Changes), u.Full)
			}
		}
		took := f.Status().Families[v1.IPv4Protocol].LastSuccess.Sub(began)
		if len(updates) < 23 || len(updates) > 26 || took != time.Duration(len(updates))*applyTakes {
			t.Errorf("%d Updates in %v, want about 24 that follow each other", len(updates), took)
		}
		if s := f.Status().Families[v1.IPv4Protocol]; !s.PendingSince.IsZero() || s.Versions.Services != "2" || s.ServicePorts != 251 {
			t.Errorf("the status in the end is %+v", s)
		}
		if logs.Len() > 0 {
			t.Errorf("logged: %v", logs.All())
		}
	})
}

// TestSyncWaitsForEveryPart: Sync waits for all that was known at the call, and not for what comes later. What failed
// is tried again once.
func TestSyncWaitsForEveryPart(t *testing.T) {
	inParts(t, withoutRetries(), proxier.Deps{}, func(t *testing.T, f *fixture) {
		var tries atomic.Int32
		f.v4.become(func(u desired.Update) (r proxier.Result, err error) {
			time.Sleep(applyTakes)
			for s := range u.Services() {
				if s.Name.Namespace == "test" {
					tries.Add(1)
					r.Failed = append(r.Failed, &proxier.ServiceError{Name: s.Name, Err: errors.New("no")})
				}
			}
			return r, nil
		})
		f.OnServiceAdd(service("bad", "10.1.0.1"))
		pass(time.Second)
		f.manyServices("big", 0, 100)
		var more atomic.Bool
		more.Store(true)
		go func() {
			for i := 0; more.Load(); i += 5 {
				f.manyServices("later", 1000+i, 5)
				time.Sleep(applyTakes)
			}
		}()
		tries.Store(0)
		pass(time.Millisecond) // during the first part
		began := time.Now()
		if err := f.Sync(t.Context()); err != nil {
			t.Error(err)
		}
		state := f.Programmed(v1.IPv4Protocol)
		for i := range 100 {
			if len(state.ServicePorts(types.NamespacedName{Namespace: "big", Name: strconv.Itoa(i)})) == 0 {
				t.Errorf("after Sync, Service %d is not programmed", i)
			}
		}
		if took := time.Since(began); took < 10*applyTakes || took > 25*applyTakes {
			t.Errorf("Sync takes %v, want 10 to 25 parts of %v", took, applyTakes)
		}
		if n := tries.Load(); n != 1 {
			t.Errorf("what has failed was tried again %d times, want once", n)
		}
		f.v4.failWith(func(desired.Update) error { return errors.New("kernel says no") })
		if err := f.Sync(t.Context()); err == nil {
			t.Error("Sync = nil, want the error of a part")
		}
		more.Store(false)
	})
}

// TestFullSyncsHaveNoParts: the first one, the one after a failure, and the one for another node.
func TestFullSyncsHaveNoParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := withoutRetries()
		config.Runner.Gather = 2 * time.Millisecond
		f := newFixtureWith(t, config, proxier.Deps{}, &fakeEngine{part: 10}, &fakeEngine{part: 10})
		f.run(t, func(t *testing.T, f *fixture) {
			want := func(when string, updates, changes int) {
				t.Helper()
				pass(time.Second)
				if all := f.v4.updates(); len(all) != updates || !all[len(all)-1].Full || len(all[len(all)-1].Changes) != changes {
					t.Errorf("%s: %d Updates, and the last one has %d changes, full: %v; want %d and %d", when,
						len(all), len(all[len(all)-1].Changes), all[len(all)-1].Full, updates, changes)
				}
			}
			f.manyServices("big", 0, 50)
			f.synced()
			want("first", 1, 50)
			f.v4.failWith(func(desired.Update) error { return errors.New("no") })
			f.manyServices("big", 50, 50)
			pass(time.Second)
			f.v4.failWith(nil)
			f.OnServiceAdd(service("a", "10.1.0.1"))
			want("after a failure", 3, 101)
			f.manyServices("big", 100, 50)
			f.OnNodeChange(changetracker.Node{Name: "other"})
			want("for another node", 4, 151)
		})
	})
}

// TestPartsSearchForFlowsNowAndThen: a search costs what the kernel tracks, so that it takes a tenth of the time of the
// parts, and follows the last one. Until then nothing says that all is done.
func TestPartsSearchForFlowsNowAndThen(t *testing.T) {
	c := &fakeConntrack{}
	conntrack := c.conntrack()
	var searches atomic.Int32
	conntrack.Clean = func(ctx context.Context, family v1.IPFamily, check desired.FlowCheck) (int, error) {
		if family == v1.IPv4Protocol {
			searches.Add(1)
			time.Sleep(applyTakes)
		}
		return c.Clean(ctx, family, check)
	}
	inParts(t, proxier.Config{}, proxier.Deps{Conntrack: conntrack}, func(t *testing.T, f *fixture) {
		searches.Store(0)
		f.manyServices("big", 0, 250, proxiertest.Port("dns", v1.ProtocolUDP, 53)) // 500 service ports
		pass(5*applyTakes + time.Millisecond)
		if v := f.Status().Families[v1.IPv4Protocol].Versions; v != (changetracker.Versions{}) {
			t.Errorf("the versions are %v while flows are left, want none", v)
		}
		pass(10 * time.Second)
		parts, n := len(f.v4.updates())-1, int(searches.Load())
		if n < 3 || n > 2+parts/8 {
			t.Errorf("%d searches for %d parts, want one for about ten parts", n, parts)
		}
		if v := f.Status().Families[v1.IPv4Protocol].Versions; v.Services != "1" {
			t.Errorf("the versions are %v in the end", v)
		}
		found := map[desired.Key]bool{}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, check := range c.checks {
			for _, flows := range check.Frontends {
				found[flows.Key] = true
			}
		}
		if len(found) != 250 {
			t.Errorf("searched for flows of %d frontends, want 250", len(found))
		}
	})
}

// owners folds Updates: who has each frontend, as an engine would.
type owners map[desired.Key]string

func (o owners) apply(u *desired.Update) {
	for _, c := range u.Changes {
		if c.Before != nil {
			for i := range c.Before.Frontends {
				if key := c.Before.Key(&c.Before.Frontends[i]); o[key] == c.Name.String() {
					delete(o, key)
				}
			}
		}
	}
	for s := range u.Services() {
		for i := range s.Frontends {
			o[s.Key(&s.Frontends[i])] = s.Name.String()
		}
	}
}

// TestFrontendsPassBetweenParts: whatever passes from one Service to another, and in whatever order their events come, a
// frontend that has an owner before a large change and after it has one after each part; and nobody hears of a
// conflict that does not last.
func TestFrontendsPassBetweenParts(t *testing.T) {
	for seed := range uint64(20) {
		core, logs := observer.New(zap.WarnLevel)
		inParts(t, proxier.Config{Runner: runner.Options{Gather: 2 * time.Millisecond}}, proxier.Deps{Logger: zap.New(core)}, func(t *testing.T, f *fixture) {
			const services = 60
			r := rand.New(rand.NewPCG(seed, 1))
			give := func(numbers []int) {
				for _, i := range r.Perm(services) {
					f.OnServiceAdd(proxiertest.Service(fmt.Sprintf("ns-%d", i%3), strconv.Itoa(i), proxiertest.ClusterIPs(fmt.Sprintf("10.0.0.%d", i+1)),
						proxiertest.ExternalIPs(fmt.Sprintf("192.0.2.%d", numbers[i]+1)), proxiertest.NodePort("web", v1.ProtocolTCP, 80, int32(30000+numbers[services-1-i]))))
				}
			}
			numbers := r.Perm(services)
			give(numbers)
			pass(10 * time.Second)
			engine := owners{}
			seen := f.v4.updates()
			for i := range seen {
				engine.apply(&seen[i])
			}
			had := maps.Clone(engine)
			for range 1 + r.IntN(services) { // chains, swaps and cycles
				a, b := r.IntN(services), r.IntN(services)
				numbers[a], numbers[b] = numbers[b], numbers[a]
			}
			give(numbers)
			pass(10 * time.Second)
			for i, u := range f.v4.updates()[len(seen):] {
				engine.apply(&u)
				for key := range had {
					if engine[key] == "" {
						t.Errorf("seed %d: nobody has %v after part %d", seed, key, i)
					}
				}
			}
			if logs.Len() > 0 || len(engine) != len(had) || len(had) != 3*services {
				t.Errorf("seed %d: %d frontends, then %d; logged %v", seed, len(had), len(engine), logs.All())
			}
		})
	}
}

// TestTriggersOfParts: each is reported once, by the part that has its change.
func TestTriggersOfParts(t *testing.T) {
	reports := &observed{}
	inParts(t, proxier.Config{}, proxier.Deps{Observer: reports}, func(t *testing.T, f *fixture) {
		f.manyServices("big", 0, 35)
		for i := range 35 {
			s := proxiertest.Slice("big", strconv.Itoa(i), discovery.AddressTypeIPv4, proxiertest.SlicePort("web", v1.ProtocolTCP, 80), proxiertest.Endpoint("10.9.0.1"))
			s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: time.Now().Add(time.Duration(1+i) * time.Second).Format(time.RFC3339Nano)}
			f.OnEndpointSliceAdd(s)
		}
		pass(time.Second)
		reports.mu.Lock()
		defer reports.mu.Unlock()
		seen := map[time.Time]int{}
		for _, r := range reports.reports {
			if len(r.Triggers) > 11 {
				t.Errorf("a part has %d triggers", len(r.Triggers))
			}
			if r.Changes > 0 && r.Queued.IsZero() {
				t.Error("a part does not say when its changes came")
			}
			for _, at := range r.Triggers {
				seen[at.UTC()]++
			}
		}
		if len(seen) != 35 || slices.Max(slices.Collect(maps.Values(seen))) != 1 {
			t.Errorf("%d triggers are reported, want 35 once: %v", len(seen), seen)
		}
	})
}
