package proxier

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/runner"
)

// outcome is the outcome of one sync of a family.
type outcome struct {
	SyncReport
	watch      stopwatch
	ended      bool  // by its context, which is no fault
	programmed bool  // everything but single service ports
	late       error // of what follows programming
	more       bool  // changes are left for the next part
	unclean    bool  // the search for flows is left for it
	state      *changetracker.State
	// outcomes are what became of service ports, and errs why some failed.
	outcomes []desired.Applied
	errs     map[changetracker.ServicePortName]*ServiceError
	limits   map[changetracker.ServicePortName]*ServiceError
	lines    serviceLines
}

// eventPause is the longest pause after a sync that failed as a whole if something changes meanwhile.
const eventPause = time.Second

// retry says when to try again what has failed.
type retry struct {
	failures       int
	last           time.Time // failure
	floor, planned time.Time // if something has changed since, and if not
}

func (r *retry) failed(b *runner.Backoff, now time.Time) {
	r.failures++
	pause := b.Pause(r.failures)
	r.last, r.floor, r.planned = now, now.Add(min(pause, eventPause)), now.Add(pause)
}

// next is when to try again if a change was last queued then; zero if nothing failed.
func (r *retry) next(queued time.Time) time.Time {
	if queued.After(r.last) {
		return r.floor
	}
	return r.planned
}

// attempt syncs the family, unless it waits after a failure: its error is that failure then. It
// returns when the family wants the next sync; zero if it does not.
func (f *family) attempt(ctx context.Context, s *syncOrder) (o *outcome, next time.Time, err error) {
	if wait := f.broken.next(s.queued); !s.awaited && time.Now().Before(wait) {
		f.locked(func() { err = f.recorded.LastError })
		return nil, wait, err
	}
	o = f.sync(ctx, s)
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case errors.Is(o.Err, ErrContested):
		return o, f.repairs.due(), o.Err
	case o.Err != nil:
		f.broken.failed(&f.config.Runner.Retry, now)
		return o, f.broken.planned, o.Err
	case o.late != nil:
		f.late.failed(&f.config.Runner.Retry, now)
	default:
		f.late = retry{}
	}
	f.broken = retry{}
	if o.more {
		return o, runner.AtOnce(), nil
	}
	next = earliest(f.ports.next(), earliest(f.late.planned, f.ending.next()))
	if f.repairs.pending() {
		next = earliest(next, latest(f.repairs.due(), now))
	}
	return o, next, nil
}

// syncOrder is what all families get for a sync.
type syncOrder struct {
	serviceCIDRs []netip.Prefix
	lockErr      error     // another instance holds the names
	queued       time.Time // the last change
	awaited      bool      // by somebody who wants that all is tried again now
}

// sync programs the family, unless another instance holds its names.
func (f *family) sync(ctx context.Context, s *syncOrder) *outcome {
	o := &outcome{SyncReport: SyncReport{Family: f.name, Queued: f.tracker.PendingSince(f.name), Started: time.Now()}}
	f.locked(func() { // the Status during this sync has the Failed of what is applied now
		f.recorded.Versions = f.tracker.Applied(f.name)
		f.lag.syncStarted(o.Started)
	})
	repair := f.repairState(o.Started)
	switch {
	case s.lockErr != nil:
		o.Err = s.lockErr
	case repair.postponed && f.full:
		o.Err = ErrContested
	default:
		o.watch.last = o.Started
		part := f.part
		o.Repair = repair.due
		if o.Full = f.full || o.Repair || o.Started.Sub(f.lastFull) >= f.config.FullSyncPeriod; o.Full {
			part.Size = 0
		}
		_ = f.tracker.ApplyPart(f.name, part, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			o.watch.lap(StageTracker)
			f.prepare(delta.After.Node(), s.serviceCIDRs)
			f.takeDue(o.Started, s.awaited)
			f.apply(ctx, delta, o)
			return nil, o.Err // those that failed have records
		})
	}
	if o.Full {
		f.fullSyncEnded(repair.counts, o.Started)
	}
	if o.Err != nil {
		o.Err = fmt.Errorf("%s: %w", f.name, o.Err)
	}
	o.ended = (o.Err != nil || o.late != nil) && ctx.Err() != nil
	o.Duration, o.Stages = time.Since(o.Started), o.watch.stages
	f.record(o)
	return o
}

// prepare takes over what may change at run time.
func (f *family) prepare(node changetracker.Node, serviceCIDRs []netip.Prefix) {
	c := f.config
	f.globals = c.globalsFor(f.name, node, serviceCIDRs)
	f.resolver = desired.Resolver{
		Node:                node,
		MasqueradeAll:       c.Masquerade.All,
		DetectsPods:         f.globals.DetectsPods(),
		Kinds:               c.Kinds,
		EditSelection:       c.EditSelection,
		DenyNodeExternalIPs: c.DenyNodeExternalIPs,
		ReservedExternalIPs: c.ReservedExternalIPs,
	}
}

// apply brings the engine to the State, and fills in the outcome.
func (f *family) apply(ctx context.Context, delta changetracker.Delta, o *outcome) {
	o.state, o.more, o.Changes, o.ServicePorts = delta.After, delta.More, len(delta.Changes), delta.After.Len()
	o.Full = o.Full || delta.Full
	f.full = true // unless this succeeds
	if o.Repair {
		f.flows.recheckEverything()
	}
	update := f.updater.Next(delta, f.resolver, f.globals, o.Full)
	o.watch.lap(StageResolve)
	f.announcements.withdrawRemoved(ctx, &update)
	result, err := f.engine.Apply(ctx, update)
	for o.Full && f.waitForModule(ctx, err) {
		result, err = f.engine.Apply(ctx, update)
	}
	f.updateConflicts(&update) // the engine may learn from the kernel what it cannot do
	o.Apply = result.Report
	o.watch.split(StagePlan, StageApply, o.Apply.Kernel)
	if o.Err = err; err != nil {
		return
	}
	o.programmed, f.full = true, false
	if o.Full {
		f.lastFull = o.Started
	}
	var failed []changetracker.ServicePortName
	o.errs, failed = failures(result.Failed)
	o.limits, _ = failures(result.Limited)
	o.outcomes = f.updater.Done(failed)
	f.follow(ctx, delta, o, &update, &result)
}

// takeDue adds the service ports to the next Update that are to be tried again.
func (f *family) takeDue(now time.Time, all bool) {
	f.mu.Lock()
	due, damaged := f.ports.takeDue(now, all)
	f.mu.Unlock()
	f.updater.Retry(due...)
	f.flows.recheckAll(damaged)
}

// follow tells everybody what became of service ports.
func (f *family) follow(ctx context.Context, delta changetracker.Delta, o *outcome, update *desired.Update, result *Result) {
	f.recordPorts(o, delta.Changes)
	f.flows.update(o.outcomes, update, result)
	f.ending.update(o.outcomes, update, result)
	f.followTraffic(o.outcomes, result)
	f.noLocal.update(o.outcomes)
	f.locked(func() {
		f.leaving.update(o.outcomes, o.state, f.config.EditSelection != nil)
		f.programmed = programmed{
			state: o.state, resolver: f.resolver, globals: f.globals, traits: f.traits,
			resolved: desired.NewResolved(o.state, f.resolver, f.globals),
		}
	})
	f.lookups.forget(o.Started)
	announced := f.announcements.announceProgrammed(ctx, o)
	f.setLasting(&f.unannounced, ConditionAnnouncements, announced, "VIPs are not announced or withdrawn, will be retried")
	o.watch.last = time.Now()
	deleted, checked, cleaned := f.cleanFlows(ctx, o)
	if o.FlowsDeleted = deleted; checked {
		o.watch.lap(StageConntrack)
	}
	o.late = errors.Join(announced, cleaned)
	health := healthUpdate(o.state, delta, o.Full)
	if f.config.servesLoadBalancers() && (len(health.Ports) > 0 || health.Full) {
		o.watch.last = time.Now()
		health.NodePortAddresses = f.globals.NodePortAddresses
		f.health.Update(f.name, health)
		o.watch.lap(StageHealth)
	}
}

// recordPorts updates the records of service ports. Triggers of changes that failed wait there.
func (f *family) recordPorts(o *outcome, changes []changetracker.PortChange) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	for i := range o.outcomes {
		name := o.outcomes[i].Name
		if e := o.errs[name]; e != nil {
			before := f.ports.failedNow(e, o.outcomes[i].Is, now, o.Started)
			o.lines.worse(before, e)
			continue
		}
		repaired := f.ports.repaired(name)
		if e := o.limits[name]; e != nil {
			o.lines.limit(f.ports.byName[name], e)
		}
		before, triggers := f.ports.programmed(name, o.limits[name], now)
		o.Triggers = append(o.Triggers, triggers...)
		o.lines.better(name, before, repaired)
	}
	for i := range changes {
		c := &changes[i]
		if len(c.Triggers) == 0 {
			continue
		}
		if r := f.ports.byName[c.Name]; r != nil && r.failed != nil {
			r.triggers = append(r.triggers, c.Triggers...)
		} else {
			o.Triggers = append(o.Triggers, c.Triggers...)
		}
	}
}

// followTraffic tells which flows are those of service ports. The engine counts the traffic
// of flows that end at its own sockets.
func (f *family) followTraffic(outcomes []desired.Applied, result *Result) {
	if !f.traffic {
		return
	}
	f.conntrack.FollowTraffic(f.name, outcomes, desired.NewFlowCheck(&f.globals, f.engine.Traits(nil)), func(s *desired.Service) bool {
		_, terminates := result.FlowEnds[s.Name]
		return !terminates
	})
}
