package proxier

import (
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
)

// began notes the begin of a sync.
func (f *family) began(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lag.began(now)
}

// record notes and logs what a sync came to.
func (f *family) record(o *outcome, started, ended time.Time) {
	switch wasFailing := f.update(o, ended); {
	case errors.Is(o.err, ErrContested):
		f.log.Debug("sync waits", zap.Error(o.err))
	case o.err != nil:
		f.log.Warn("sync failed, will be retried", zap.Error(o.err))
	case wasFailing:
		f.log.Info("sync succeeds again")
	default:
		f.log.Debug("synced", zap.Bool("full", o.full), zap.Int("changes", o.changes), zap.Duration("took", ended.Sub(started)))
	}
}

// update brings up to date what the family tells of itself.
func (f *family) update(o *outcome, ended time.Time) (wasFailing bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lag.ended(o)
	s := &f.recorded
	wasFailing = s.LastError != nil
	if !o.programmed { // who failed before has not been programmed since
		o.failed = firstOfEach(append(slices.Clone(o.failed), s.Failed...))
	}
	s.LastAttempt, s.LastError, s.Failed = ended, o.err, o.failed
	if errors.Is(o.err, ErrContested) {
		o.servicePorts = s.ServicePorts // nothing was done
	}
	s.ServicePorts = o.servicePorts
	s.NoLocalInternal, s.NoLocalExternal = f.shortages.count.internal, f.shortages.count.external
	if o.err == nil {
		s.LastSuccess = ended
	}
	s.Synced = s.Synced || o.full && !f.full
	return wasFailing
}

// setProgrammed notes what the engine has been given with success.
func (f *family) setProgrammed(state *changetracker.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.programmed = programmed{state: state, resolver: f.resolver, globals: f.globals, traits: f.engine.Traits}
}

// status is the part of the family in Status. pending is since when a change waits.
func (f *family) status(pending, now time.Time) (s FamilyStatus, conditions []Condition, conflicts []changetracker.Problem) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s = f.recorded
	s.PendingSince, s.StaleSince = pending, f.lag.since(pending)
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
	add(f.taken, f.taken.Type != "")
	add(f.watching.condition(now))
	add(shortOfDescriptors(&s.Descriptors))
	return s, conditions, f.conflicts
}

// countConflicts adds up the conflicts by reason.
func (f *family) countConflicts(counts map[changetracker.Reason]int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conflicts {
		counts[c.Reason]++
	}
}
