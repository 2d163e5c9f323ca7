package proxier

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// family drives one engine. But for those below mu its fields are owned by the goroutine
// that syncs it, which is never more than one at a time.
type family struct {
	name     v1.IPFamily
	engine   Engine
	resolver desired.Resolver
	globals  desired.Globals
	log      *zap.Logger

	updater *desired.Updater
	// denied are the service ports that do not get all that they ask for.
	denied         map[changetracker.ServicePortName]*desired.Service
	full           bool // the next Update must be full: at start, and after a failure
	lastFull       time.Time
	period         time.Duration
	loadingRetries int // for a kernel that lacks something, maxLoadingRetries at start

	conntrack     Conntrack // nil: none
	flows         *flowTracker
	shortages     shortages
	announcements *announcements
	lock          lock
	lockTakenBy   string      // who has the lock's name, as was logged
	repair        *time.Timer // wakes the runner for a repair
	trigger       func()      // does so at once

	mu         sync.Mutex   // guards all below
	recorded   FamilyStatus // as the last sync has left it
	conflicts  []changetracker.Problem
	programmed programmed
	staleFlows Condition
	taken      Condition // the names, by somebody else
	lag        lag
	repairs    repairs
	watching   watching
	again      map[changetracker.ServicePortName]bool // to be programmed again
}

// attempt is what a sync of a family starts with.
type attempt struct {
	started time.Time
	repair  bool // there is damage to repair
	watch   *stopwatch
}

// outcome is what one sync of a family came to.
type outcome struct {
	full         bool
	repair       bool
	stages       []Stage
	state        *changetracker.State
	health       HealthUpdate
	applied      ApplyReport
	programmed   bool // everything, but for failed
	changes      int
	servicePorts int
	triggers     []time.Time
	failed       []*ServiceError
	retry        []changetracker.ServicePortName
	flowsDeleted int
	err          error
}

// apply brings the engine to the State.
func (f *family) apply(ctx context.Context, step changetracker.Step, s attempt) outcome {
	state, delta := step.After, step.Delta
	o := outcome{
		full:         delta.Full || f.full || s.repair || s.started.Sub(f.lastFull) >= f.period,
		repair:       s.repair,
		changes:      len(delta.Changes),
		servicePorts: state.Len(),
		state:        state,
	}
	f.full = true // unless this succeeds
	f.updater.Retry(f.damagedPorts()...)
	update := f.updater.Next(step, f.resolver, f.globals, o.full)
	f.note(&update)
	s.watch.lap(StageResolve)
	f.announcements.before(ctx, state, &update)
	result, err := f.engine.Apply(ctx, update)
	for o.full && f.mayBeLoading(ctx, err) {
		result, err = f.engine.Apply(ctx, update)
	}
	o.applied = result.Report
	s.watch.split(StagePlan, StageApply, o.applied.Kernel)
	if o.err = err; err != nil {
		return o
	}
	o.failed = failures(result.Failed)
	o.err = joined(o.failed)
	o.programmed, f.full = true, false
	o.retry = f.updater.Done(namesOf(o.failed))
	f.flows.update(state, &update, &result)
	f.shortages.update(&update)
	o.err = errors.Join(o.err, f.announcements.after(ctx, &update, o.failed))
	o.health = healthUpdate(state, delta, o.full)
	if o.full {
		f.lastFull = s.started
	}
	for i := range delta.Changes {
		o.triggers = append(o.triggers, delta.Changes[i].Triggers...)
	}
	return o
}

// A kernel says that it lacks a feature while the module is still being loaded for
// somebody else, such as the other family: busybox's modprobe finds a module in
// /proc/modules, and does not wait until it works.
const (
	maxLoadingRetries = 3
	loadingPause      = 100 * time.Millisecond
)

// mayBeLoading says, after a pause, whether what the kernel lacked deserves another
// attempt before anybody hears of it. There are only a few in a family's life.
func (f *family) mayBeLoading(ctx context.Context, err error) bool {
	if f.loadingRetries == 0 || !errors.As(err, new(*UnsupportedError)) {
		return false
	}
	f.loadingRetries--
	f.log.Debug("asking again for what may be loading", zap.Error(err))
	select {
	case <-time.After(loadingPause):
		return true
	case <-ctx.Done():
		return false
	}
}

// note keeps the service ports that do not get all that they ask for, and logs what is new.
func (f *family) note(update *desired.Update) {
	if update.Full {
		maps.DeleteFunc(f.denied, func(name changetracker.ServicePortName, _ *desired.Service) bool {
			_, there := update.Now.View().State().Service(name)
			return !there
		})
	}
	for i := range update.Changes {
		name, s := update.Changes[i].Name, update.Changes[i].After
		before := f.denied[name]
		if s == nil || len(s.Lost)+len(s.Refused) == 0 {
			delete(f.denied, name)
			continue
		}
		f.denied[name] = s
		if len(s.Lost) > 0 && (before == nil || !slices.Equal(s.Lost, before.Lost)) {
			owner, _ := update.Now.Owner(s.Lost[0])
			f.log.Warn("frontend belongs to another service port", zap.Stringer("service", name),
				zap.Stringer("frontend", s.Lost[0]), zap.Stringer("owner", owner))
		}
		if len(s.Refused) > 0 && (before == nil || !slices.Equal(s.Refused, before.Refused)) {
			f.log.Warn("external IPs refused: this node or its pods have them; take them out of the Service",
				zap.Stringer("service", name), zap.Stringers("externalIPs", s.Refused))
		}
	}
	if !update.Full && !slices.ContainsFunc(update.Changes, concernsFrontends) {
		return
	}
	conflicts := f.conflictsIn(update.Now)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.conflicts = conflicts
}

// concernsFrontends says that more has changed than endpoints.
func concernsFrontends(c desired.Change) bool {
	return c.Source == nil || c.Source.Before != c.Source.After
}

// conflictsIn are the frontends that service ports ask for and do not get.
func (f *family) conflictsIn(now *desired.Resolved) []changetracker.Problem {
	once := map[changetracker.Problem]bool{} // and not for each port of the Service
	var problems []changetracker.Problem
	for name, s := range f.denied {
		object := "Service " + name.NamespacedName.String()
		for _, a := range s.Refused {
			once[changetracker.Problem{Object: object, Field: "spec.externalIPs", Value: a.String(), Reason: changetracker.ReasonRefused}] = true
		}
		for _, k := range s.Lost {
			owner, _ := now.Owner(k)
			problems = append(problems, changetracker.Problem{
				Object: object, Field: "port " + name.Port, Value: k.String() + " belongs to " + owner.String(), Reason: changetracker.ReasonDuplicate,
			})
		}
	}
	return slices.AppendSeq(problems, maps.Keys(once))
}

func namesOf(failed []*ServiceError) []changetracker.ServicePortName {
	names := make([]changetracker.ServicePortName, len(failed))
	for i, e := range failed {
		names[i] = e.Name
	}
	return names
}

// errNoCause is for engines that fail a service port without saying why.
var errNoCause = errors.New("the engine names no cause")

// failures are those that an engine returned: the first one of each service port, in
// their order.
func failures(failed []*ServiceError) []*ServiceError {
	failed = slices.DeleteFunc(slices.Clone(failed), func(e *ServiceError) bool { return e == nil })
	for i, e := range failed {
		if e.Err == nil {
			failed[i] = &ServiceError{Name: e.Name, Err: errNoCause, Partial: e.Partial}
		}
	}
	return firstOfEach(failed)
}

// firstOfEach sorts failures by service port, and keeps the first one of each.
func firstOfEach(failed []*ServiceError) []*ServiceError {
	slices.SortStableFunc(failed, func(a, b *ServiceError) int { return a.Name.Compare(b.Name) })
	return slices.CompactFunc(failed, func(a, b *ServiceError) bool { return a.Name == b.Name })
}

// joined is one error of several, nil of none.
func joined(failed []*ServiceError) error {
	errs := make([]error, len(failed))
	for i, e := range failed {
		errs[i] = e
	}
	return errors.Join(errs...)
}
