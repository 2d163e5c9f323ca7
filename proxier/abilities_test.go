package proxier_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// trappedEngine has one lock, like many engines: Apply, what it calls and Conditions take it.
type trappedEngine struct {
	fakeEngine
	mine     chan struct{} // full while somebody has the lock, which a bubble can wait for
	applying chan struct{}
	goOn     chan struct{}

	damagedOnce bool // owned by Apply
}

func (e *trappedEngine) Abilities() proxier.Abilities {
	return proxier.Abilities{
		Watch: e.Watch,
		Conditions: func() []proxier.Condition {
			defer e.lock()()
			return []proxier.Condition{{Type: proxier.ConditionSockets, Message: "no BPF file system"}}
		},
		Descriptors: func() connection.Descriptors { defer e.lock()(); return connection.Descriptors{Limit: 7} },
	}
}

func (e *trappedEngine) lock() (unlock func()) {
	e.mine <- struct{}{}
	return func() { <-e.mine }
}

func (e *trappedEngine) Apply(context.Context, desired.Update) (proxier.Result, error) {
	defer e.lock()()
	if !e.damagedOnce {
		e.damagedOnce = true
		close(e.applying)
		<-e.goOn
		e.damage(proxier.Damage{Object: "chain"})
	}
	return proxier.Result{}, nil
}

// TestStatusWaitsForNoLockThatAnEngineNeeds: the engine reports damage while somebody asks for the
// Status, which asks the engine.
func TestStatusWaitsForNoLockThatAnEngineNeeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &trappedEngine{mine: make(chan struct{}, 1), applying: make(chan struct{}), goOn: make(chan struct{})}
		p := newProxier(t, proxier.Deps{}, e)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		synctest.Wait()
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		<-e.applying
		asked := make(chan proxier.Status, 1)
		go func() { asked <- p.Status() }()
		time.Sleep(time.Second) // fake: until it waits for the engine
		close(e.goOn)
		if s := <-asked; s.Families[v1.IPv4Protocol].Descriptors.Limit != 7 {
			t.Errorf("Status is %+v, want what the engine says", s)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// A wrapper of a Conntrack keeps its functions, and says what the Conntrack cannot do.
func TestAWrapperOfConntrackKeepsItsFunctions(t *testing.T) {
	config := proxier.Config{CountTraffic: true}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.EndConnections = true }
	ender := &fakeEnder{}
	for what, of := range map[string]*proxier.Conntrack{"ends": ender.conntrack(), "cannot": (&fakeConntrack{}).conntrack()} {
		wrapper := *of
		wrapper.Clean = func(ctx context.Context, family v1.IPFamily, check desired.FlowCheck) (int, error) {
			return of.Clean(ctx, family, check)
		}
		runWith(t, config, proxier.Deps{Conntrack: &wrapper}, func(t *testing.T, f *fixture) {
			f.OnServiceAdd(service("a", "10.0.0.1"))
			f.synced()
			pass(time.Second)
			s := f.Status()
			if ends := what == "ends"; (ender.runs.Load() == 1) != ends || (len(s.Problems) == 0) != ends || len(s.Families[v1.IPv4Protocol].Failed) > 0 {
				t.Errorf("%s: the ender runs %d times, problems %v", what, ender.runs.Load(), s.Problems)
			}
			if !slices.Contains(s.Without, "RunTraffic") {
				t.Errorf("%s: without %v, want RunTraffic among them", what, s.Without)
			}
		})
		ender.runs.Store(0)
	}
}

// deadHealth ends at once.
type deadHealth struct {
	proxier.Health
	err error
}

func (h deadHealth) Run(context.Context, func() proxier.Status) error { return h.err }

// A part that ends early is a condition and is in the log at once, and Run returns its error in the end.
func TestAPartThatEndsEarlyIsACondition(t *testing.T) {
	for _, err := range []error{errors.New("cannot listen at all"), nil} {
		core, logs := observer.New(zap.WarnLevel)
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, proxier.Config{}, proxier.Deps{Health: deadHealth{proxier.NoHealth(), err}, Logger: zap.New(core)})
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- f.Run(ctx) }()
			f.synced()
			pass(time.Second)
			conditions := f.Status().Conditions
			if len(conditions) != 1 || conditions[0].Type != proxier.ConditionEnded || err != nil && !strings.Contains(conditions[0].Message, err.Error()) {
				t.Errorf("conditions %+v, want that it has ended", conditions)
			}
			if logs.FilterMessageSnippet("has ended").Len() != 1 {
				t.Errorf("log %v, want one line", logs.All())
			}
			stop()
			if got := <-ended; got == nil || err != nil && !errors.Is(got, err) {
				t.Errorf("Run = %v, want %v", got, err)
			}
		})
	}
}

// Conditions of the engine are in Status, with their IP family.
func TestConditionsOfTheEngine(t *testing.T) {
	p := newProxier(t, proxier.Deps{}, &trappedEngine{mine: make(chan struct{}, 1)})
	conditions := p.Status().Conditions
	if len(conditions) != 1 || conditions[0].Type != proxier.ConditionSockets || conditions[0].Family != v1.IPv4Protocol || conditions[0].Message != "no BPF file system" {
		t.Errorf("conditions %+v, want that of the engine with its family", conditions)
	}
}

// A partial update retries what failed outside the Update, without another change. ipvs, for example, may displace
// another service port.
func TestWhatFailedOutsideTheUpdateIsRetried(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.OnServiceAdd(service("b", "10.0.0.2"))
		f.synced()
		pass(time.Second)
		a := f.v4.last().Changes[0].Name
		f.v4.failWith(func(u desired.Update) error {
			if namesIn(u) == "b" {
				return someError{{Name: a, Err: errors.New("displaced")}}
			}
			return nil
		})
		f.OnServiceUpdate(nil, service("b", "10.0.0.3"))
		pass(time.Minute)
		if u := f.v4.last(); u.Full || namesIn(u) != "a" {
			t.Errorf("the last update: full %v of %q, want a partial one of a", u.Full, namesIn(u))
		}
		if failed := f.Status().Families[v1.IPv4Protocol].Failed; len(failed) != 0 {
			t.Errorf("failed = %v, want none after the retry", failed)
		}
	})
}
