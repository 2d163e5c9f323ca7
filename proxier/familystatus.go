package proxier

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// record updates the family's status after a sync, and logs what has become better or worse.
func (f *family) record(o *outcome) {
	f.updateStatus(o)
	if errors.Is(o.Err, ErrContested) {
		f.log.Debug("sync is postponed", zap.Error(o.Err))
		return
	}
	if !o.ended {
		f.logFailures(o)
		o.lines.log(f.log, o.Failed)
	}
	f.log.Debug("synced", zap.Bool("full", o.Full), zap.Int("changes", o.Changes), zap.Duration("took", o.Duration), zap.Error(o.Err))
}

func (f *family) updateStatus(o *outcome) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lag.syncEnded(o.programmed)
	f.incomplete = o.Err != nil || o.late != nil || o.unclean
	s := &f.recorded
	ended := o.Started.Add(o.Duration)
	s.LastAttempt, s.LastError = ended, o.Err
	if errors.Is(o.Err, ErrContested) {
		o.ServicePorts = s.ServicePorts // unchanged
	}
	s.ServicePorts = o.ServicePorts
	o.Failed, o.Failures = f.ports.failing, o.lines.failures()
	o.NoLocalInternal, o.NoLocalExternal = f.noLocal.internal, f.noLocal.external
	s.NoLocalInternal, s.NoLocalExternal = o.NoLocalInternal, o.NoLocalExternal
	if o.Err == nil {
		s.LastSuccess = ended
	}
	s.Synced = s.Synced || o.Full && !f.full
}

// status returns the family's part of Status. It asks the engine and others without holding a lock.
func (f *family) status(now time.Time) (s FamilyStatus, conditions []Condition, problems []changetracker.Problem) {
	add := func(c Condition, lasts bool) {
		if lasts {
			c.Family = f.name
			conditions = append(conditions, c)
		}
	}
	pending := f.tracker.PendingSince(f.name)
	f.locked(func() {
		s = f.recorded
		s.PendingSince, s.StaleSince = pending, earliest(f.lag.since(pending), f.repairs.brokenSince())
		if f.lag.running.IsZero() { // otherwise Failed is not yet that of what the tracker has applied
			s.Versions = f.tracker.Applied(f.name)
		}
		s.Failed = f.ports.failures()
		s.Repairing = f.repairs.pending() || f.ports.repairing()
		if f.incomplete || s.Repairing {
			s.Versions = changetracker.Versions{}
		}
		s.Damaged, s.LastDamage, s.LastDamageTime = f.repairs.seen.damages, f.repairs.last, f.repairs.lastTime
		problems = append(f.ports.limits(), f.conflicts...)
		add(f.repairs.condition(now))
		for _, c := range []Condition{f.staleFlows, f.unannounced, f.inUse} {
			add(c, c.Type != "")
		}
		add(f.watcher.condition(now))
	})
	slices.SortFunc(s.Failed, compareFailures)
	if f.ending != nil {
		var c Condition
		s.ConnectionsEnding, s.ConnectionsEnded, c = f.conntrack.EndingStatus(f.name)
		add(c, c.Type != "")
	}
	if f.can.Descriptors != nil {
		s.Descriptors = f.can.Descriptors()
	}
	add(descriptorCondition(&s.Descriptors))
	if f.can.Conditions != nil {
		for _, c := range f.can.Conditions() {
			add(c, true)
		}
	}
	return s, conditions, problems
}

// descriptorCondition returns ConditionDescriptors while file descriptors are short.
func descriptorCondition(d *connection.Descriptors) (c Condition, lasts bool) {
	if d.ShortSince.IsZero() {
		return Condition{}, false
	}
	return Condition{
		Type: ConditionDescriptors, Since: d.ShortSince,
		Message: fmt.Sprintf("clients use %d of %d file descriptors; %d clients were refused and %d disconnected since the start; %v uses most, %d: "+
			"raise the limit of open files (RLIMIT_NOFILE), or check the clients of that service port", d.Used, d.Limit, d.Refused, d.Ended, d.Most, d.MostUsed),
	}, true
}
