package proxier

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
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
func (f *family) watch(ctx context.Context, w Watcher) {
	pause := firstPause
	for ctx.Err() == nil {
		started := f.watchStarted()
		err := w.Watch(ctx, f.damaged)
		if ctx.Err() != nil {
			return
		}
		if time.Since(started) > longestPause {
			pause = firstPause
		}
		f.watchFailed(err)
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

func (f *family) watchStarted() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watching.started = time.Now()
	return f.watching.started
}

func (f *family) watchFailed(err error) {
	if err == nil {
		err = errors.New("the watch ended")
	}
	f.log.Warn("changes by others go unnoticed until the next full sync", zap.Error(err))
	f.mu.Lock()
	defer f.mu.Unlock()
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
func (f *family) damaged(d Damage) {
	if d.Service != (changetracker.ServicePortName{}) {
		f.damagedPort(&d)
		return
	}
	now := time.Now()
	f.mu.Lock()
	first := d != (Damage{}) && !f.repairs.damaged()
	f.repairs.damage(d, now)
	wait := f.scheduleRepair(now)
	f.mu.Unlock()
	if first {
		f.log.Warn("somebody else changed our objects", zap.Stringer("what", d), zap.Duration("repaired in", wait))
	}
}

// damagedPort has a service port programmed again by the next sync.
func (f *family) damagedPort(d *Damage) {
	f.mu.Lock()
	known := f.again[d.Service]
	f.again[d.Service] = true
	f.mu.Unlock()
	if known {
		return
	}
	f.trigger()
	f.log.Warn("a service port is not as it was programmed any more, and will be programmed again",
		zap.Stringer("service", d.Service), zap.Stringer("what", d))
}

// damagedPorts are those since the last call.
func (f *family) damagedPorts() []changetracker.ServicePortName {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := slices.Collect(maps.Keys(f.again))
	clear(f.again)
	return names
}

// scheduleRepair wakes the runner when the repair is due. f.mu is held.
func (f *family) scheduleRepair(now time.Time) time.Duration {
	wait := max(f.repairs.due().Sub(now), 0)
	if f.repairs.pending() {
		f.repair.Reset(wait)
	}
	return wait
}

// repairDue says whether there is damage to repair now, or to leave alone for the
// moment. The counts are for repairEnded.
func (f *family) repairDue(now time.Time) (due, held bool, began damageCounts) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.repairs.pending() {
		return false, false, f.repairs.seen
	}
	held = now.Before(f.repairs.due())
	return !held, held, f.repairs.seen
}

// repairEnded notes the end of a full sync.
func (f *family) repairEnded(began damageCounts) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	f.repairs.attempt(began, !f.full, now)
	f.scheduleRepair(now)
}
