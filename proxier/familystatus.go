package proxier

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// record updates the family's status after a sync, and logs what has become better or worse.
func (f *family) record(o *outcome) {
	if o.programmed {
		f.repairedPorts(o.failed)
	}
	failedBefore := f.updateStatus(o)
	if errors.Is(o.Err, ErrContested) {
		f.log.Debug("sync postponed", zap.Error(o.Err))
		return
	}
	if !o.ended {
		f.logFailures(o)
		f.logServices(failedBefore, o.failed)
	}
	f.log.Debug("synced", zap.Bool("full", o.Full), zap.Int("changes", o.Changes), zap.Duration("took", o.Duration), zap.Error(o.Err))
}

// updateStatus returns the service ports that failed before.
func (f *family) updateStatus(o *outcome) (failedBefore []*ServiceError) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lag.syncEnded(o.programmed)
	f.broken = o.failure != nil
	s := &f.recorded
	failedBefore = s.Failed
	if !o.programmed { // earlier failures remain
		o.failed = firstOfEach(append(slices.Clone(o.failed), s.Failed...))
	}
	ended := o.Started.Add(o.Duration)
	s.LastAttempt, s.LastError, s.Failed = ended, o.Err, o.failed
	if errors.Is(o.Err, ErrContested) {
		o.ServicePorts = s.ServicePorts // unchanged
	}
	s.ServicePorts = o.ServicePorts
	o.Failed, o.NoLocalInternal, o.NoLocalExternal = len(o.failed), f.noLocal.total.internal, f.noLocal.total.external
	s.NoLocalInternal, s.NoLocalExternal = o.NoLocalInternal, o.NoLocalExternal
	if o.Err == nil {
		s.LastSuccess = ended
	}
	s.Synced = s.Synced || o.Full && !f.full
	return failedBefore
}

// status returns the family's part of Status. pending is since when a change waits.
func (f *family) status(pending, now time.Time) (s FamilyStatus, conditions []Condition, conflicts []changetracker.Problem) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s = f.recorded
	s.PendingSince, s.StaleSince = pending, earliest(f.lag.since(pending), f.repairs.brokenSince())
	if f.lag.running.IsZero() { // otherwise Failed is not yet that of what the tracker has applied
		s.Versions = f.tracker.Applied(f.name)
	}
	s.Repairing = f.repairs.pending() || f.portRepairsPendingLocked()
	if f.broken || s.Repairing {
		s.Versions = changetracker.Versions{}
	}
	s.Damaged, s.LastDamage, s.LastDamageTime = f.repairs.seen.damages, f.repairs.last, f.repairs.lastTime
	if h, ok := As[descriptorHolder](f.engine); ok {
		s.Descriptors = h.Descriptors()
	}
	add := func(c Condition, lasts bool) {
		if lasts {
			c.Family = f.name
			conditions = append(conditions, c)
		}
	}
	add(f.repairs.condition(now))
	add(f.staleFlows, f.staleFlows.Type != "")
	if f.ending != nil {
		var c Condition
		s.Ending, c = f.ending.ender.EndingStatus(f.name)
		add(c, c.Type != "")
	}
	add(f.inUse, f.inUse.Type != "")
	add(f.watcher.condition(now))
	add(descriptorCondition(&s.Descriptors))
	if e, ok := As[conditional](f.engine); ok {
		for _, c := range e.Conditions() {
			add(c, true)
		}
	}
	return s, conditions, f.conflicts
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
