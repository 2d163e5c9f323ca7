package proxier

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// sync programs the family, unless lockErr says that another instance holds its names.
func (f *family) sync(ctx context.Context, serviceCIDRs []netip.Prefix, lockErr error) *outcome {
	o := &outcome{SyncReport: SyncReport{Family: f.name, Queued: f.tracker.PendingSince(f.name), Started: time.Now()}}
	f.locked(func() { // the Status during this sync has the Failed of what is applied now
		f.recorded.Versions = f.tracker.Applied(f.name)
		f.lag.syncStarted(o.Started)
	})
	repair := f.repairState(o.Started)
	var after error
	switch {
	case lockErr != nil:
		o.Err = lockErr
	case repair.postponed && f.full:
		o.Err = ErrContested
	default:
		o.watch.last = o.Started
		_ = f.tracker.Apply(f.name, func(step changetracker.Step) ([]changetracker.ServicePortName, error) {
			o.watch.lap(StageTracker)
			f.prepare(step.After.Node(), serviceCIDRs)
			f.apply(ctx, step, o, repair.due)
			if !o.programmed {
				return nil, o.Err
			}
			after = f.afterApply(ctx, o)
			return o.retry, nil
		})
	}
	if o.Full {
		f.fullSyncEnded(repair.counts, o.Started)
	}
	if o.failure = o.Err; o.programmed {
		o.Err, o.failure = errors.Join(o.Err, after), errors.Join(o.announced, after)
	}
	if o.Err != nil {
		o.Err = fmt.Errorf("%s: %w", f.name, o.Err)
	}
	o.ended = o.Err != nil && ctx.Err() != nil
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
func (f *family) apply(ctx context.Context, step changetracker.Step, o *outcome, repair bool) {
	o.state, o.Repair, o.Changes, o.ServicePorts = step.After, repair, len(step.Delta.Changes), step.After.Len()
	o.Full = step.Delta.Full || f.full || repair || o.Started.Sub(f.lastFull) >= f.config.FullSyncPeriod
	f.full = true // unless this succeeds
	damaged := f.takeDamagedPorts()
	f.updater.Retry(damaged...)
	f.flows.suspect(slices.Values(damaged))
	if repair {
		f.flows.suspectAll()
	}
	update := f.updater.Next(step, f.resolver, f.globals, o.Full)
	o.watch.lap(StageResolve)
	f.announcements.withdrawRemoved(ctx, o.state, &update)
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
	o.failed = f.dated(failures(result.Failed), o.Started)
	o.retry = f.updater.Done(namesOf(o.failed))
	f.flows.update(o.state, &update, &result)
	f.ending.update(o.state, &update, &result)
	f.followTraffic(&update, &result)
	f.noLocal.update(&update)
	o.announced = f.announcements.announceProgrammed(ctx, &update, o.failed)
	o.Err = errors.Join(joined(o.failed), o.announced)
	o.health = f.healthUpdate(o, step.Delta)
	failed := make(map[changetracker.ServicePortName]bool, len(o.retry))
	for _, name := range o.retry {
		failed[name] = true
	}
	for i := range step.Delta.Changes { // the tracker returns those of ports that failed once more
		if c := &step.Delta.Changes[i]; !failed[c.Name] {
			o.Triggers = append(o.Triggers, c.Triggers...)
		}
	}
}

// followTraffic tells which flows are those of service ports. The engine counts the traffic
// of flows that end at its own sockets.
func (f *family) followTraffic(update *desired.Update, result *Result) {
	if f.traffic == nil {
		return
	}
	f.traffic.FollowTraffic(update, desired.NewFlowCheck(&f.globals, f.engine.Traits(nil)), func(s *desired.Service) bool {
		_, terminates := result.FlowEnds[s.Name]
		return !terminates
	})
}

// afterApply does the parts of a sync that follow programming.
func (f *family) afterApply(ctx context.Context, o *outcome) error {
	f.locked(func() {
		f.programmed = programmed{
			state: o.state, resolver: f.resolver, globals: f.globals, traits: f.engine.Traits,
			resolved: desired.NewResolved(o.state, f.resolver, f.globals),
		}
	})
	o.watch.last = time.Now()
	deleted, checked, err := f.cleanFlows(ctx)
	if o.FlowsDeleted = deleted; checked {
		o.watch.lap(StageConntrack)
	}
	if f.config.servesLoadBalancers() && (len(o.health.Ports) > 0 || o.health.Full) {
		o.watch.last = time.Now()
		o.health.NodePortAddresses = f.globals.NodePortAddresses
		f.health.Update(f.name, o.health)
		o.watch.lap(StageHealth)
	}
	return err
}
