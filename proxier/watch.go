package proxier

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"
)

// watching is the state of a family's Watcher.
type watching struct {
	// err is why it failed last, since is when it began to fail; nil while it works.
	err   error
	since time.Time
	// started is when it was started last; zero while it is not running.
	started time.Time
}

// watch keeps a Watcher going until ctx ends.
func (p *Proxier) watch(ctx context.Context, f *family, w Watcher) {
	pause := firstPause
	for ctx.Err() == nil {
		started := p.watchStarted(f)
		err := w.Watch(ctx, func(d Damage) { p.damaged(f, d) })
		if ctx.Err() != nil {
			return
		}
		if time.Since(started) > longestPause {
			pause = firstPause
		}
		p.watchFailed(f, err)
		if errors.Is(err, errors.ErrUnsupported) {
			return
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, longestPause)
		case <-ctx.Done():
		}
	}
}

func (p *Proxier) watchStarted(f *family) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.watching.started = time.Now()
	return f.watching.started
}

func (p *Proxier) watchFailed(f *family, err error) {
	if err == nil {
		err = errors.New("the watch ended")
	}
	f.log.Warn("changes by others go unnoticed until the next full sync", zap.Error(err))
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if f.watching.works(now) {
		f.watching.since = now
	}
	f.watching.err, f.watching.started = err, time.Time{}
}

// works says that there is no failure, or that the last one is overcome.
func (w *watching) works(now time.Time) bool {
	return w.err == nil || !w.started.IsZero() && now.Sub(w.started) > firstPause
}

func (w *watching) condition(now time.Time) (c Condition, lasts bool) {
	if w.works(now) {
		return Condition{}, false
	}
	return Condition{Type: ConditionUnwatched, Since: w.since, Message: w.err.Error()}, true
}

// damaged notes a change of the family's objects by somebody else, and asks for a
// repair. It may be called from within a sync.
func (p *Proxier) damaged(f *family, d Damage) {
	now := time.Now()
	p.mu.Lock()
	first := d != (Damage{}) && !f.repairs.damaged()
	f.repairs.damage(d, now)
	wait := p.scheduleRepair(f, now)
	p.mu.Unlock()
	if first {
		f.log.Warn("somebody else changed our objects", zap.Stringer("what", d), zap.Duration("repaired in", wait))
	}
}

// scheduleRepair wakes the runner when the repair is due. p.mu is held.
func (p *Proxier) scheduleRepair(f *family, now time.Time) time.Duration {
	wait := max(f.repairs.due().Sub(now), 0)
	if f.repairs.pending() {
		f.repair.Reset(wait)
	}
	return wait
}

// repairDue says whether there is damage to repair now, or to leave alone for the
// moment. The counts are for repairEnded.
func (p *Proxier) repairDue(f *family, now time.Time) (due, held bool, began damageCounts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !f.repairs.pending() {
		return false, false, f.repairs.seen
	}
	held = now.Before(f.repairs.due())
	return !held, held, f.repairs.seen
}

// repairEnded notes the end of a full sync.
func (p *Proxier) repairEnded(f *family, began damageCounts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	f.repairs.attempt(began, !f.full, now)
	p.scheduleRepair(f, now)
}

// addWatched adds to the status what others did to a family's objects. p.mu is
// held.
func (p *Proxier) addWatched(s *Status, f *family, now time.Time) {
	status := s.Families[f.name]
	status.Damaged, status.LastDamage, status.LastDamageTime = f.repairs.seen.damages, f.repairs.last, f.repairs.lastTime
	if h, ok := As[descriptorHolder](f.engine); ok {
		status.Descriptors = h.Descriptors()
	}
	s.Families[f.name] = status
	short := func(time.Time) (Condition, bool) { return shortOfDescriptors(&status.Descriptors) }
	flows := func(time.Time) (Condition, bool) { return f.staleFlows, f.staleFlows.Type != "" }
	taken := func(time.Time) (Condition, bool) { return f.taken, f.taken.Type != "" }
	for _, condition := range []func(time.Time) (Condition, bool){f.repairs.condition, flows, taken, f.watching.condition, short} {
		if c, lasts := condition(now); lasts {
			c.Family = f.name
			s.Conditions = append(s.Conditions, c)
		}
	}
}
