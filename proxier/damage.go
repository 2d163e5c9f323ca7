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

// watch keeps a Watcher running until ctx ends.
func (f *family) watch(ctx context.Context, w Watcher) {
	pause := firstPause
	for ctx.Err() == nil {
		started := time.Now()
		f.locked(func() { f.watcher.started(started) })
		err := w.Watch(ctx, f.damaged)
		if ctx.Err() != nil {
			return
		}
		now := time.Now()
		f.locked(func() { f.watcher.failed(err, now) })
		f.log.Warn("changes by other programs are not detected until the next full sync", zap.Error(f.watcher.err))
		if errors.Is(err, errors.ErrUnsupported) {
			return
		}
		if now.Sub(started) > longestPause {
			pause = firstPause
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, longestPause)
		case <-ctx.Done():
		}
	}
}

// damaged records a change of the family's objects by another program, and schedules a
// repair. It may be called during a sync.
func (f *family) damaged(d Damage) {
	if d.Service != (changetracker.ServicePortName{}) {
		f.damagedPort(&d)
		return
	}
	now := time.Now()
	f.mu.Lock()
	first := d != (Damage{}) && f.repairs.beginsRow(now)
	f.repairs.damage(d, now)
	wait := f.scheduleRepairLocked(now)
	f.mu.Unlock()
	if first {
		f.log.Warn("another program changed our kernel objects", zap.Stringer("what", d), zap.Duration("repaired in", wait))
	}
}

// damagedPort makes the next sync program a service port again.
func (f *family) damagedPort(d *Damage) {
	f.mu.Lock()
	taken, known := f.damagedPorts[d.Service]
	f.damagedPorts[d.Service] = false
	f.mu.Unlock()
	if known && !taken {
		return
	}
	f.trigger()
	f.log.Warn("service port was damaged, will be programmed again",
		zap.Stringer("service", d.Service), zap.Stringer("what", d))
}

// takeDamagedPorts returns the service ports that are to be repaired.
func (f *family) takeDamagedPorts() []changetracker.ServicePortName {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := slices.Collect(maps.Keys(f.damagedPorts))
	for _, name := range names {
		f.damagedPorts[name] = true
	}
	return names
}

// scheduleRepairLocked triggers a sync when the repair is due.
func (f *family) scheduleRepairLocked(now time.Time) time.Duration {
	wait := max(f.repairs.due().Sub(now), 0)
	if f.repairs.pending() {
		f.repairTimer.Reset(wait)
	}
	return wait
}

// repairState is what a sync must know about damage when it starts.
type repairState struct {
	due       bool // there is damage to repair now
	postponed bool // there is damage, but the repair has to wait
	counts    damageCounts
}

func (f *family) repairState(now time.Time) repairState {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := repairState{counts: f.repairs.seen}
	if f.repairs.pending() {
		s.postponed = now.Before(f.repairs.due())
		s.due = !s.postponed
	}
	return s
}

// fullSyncEnded records the end of a full sync that started with these counts.
func (f *family) fullSyncEnded(started damageCounts) {
	f.mu.Lock()
	defer f.mu.Unlock()
	wasDamaged := f.repairs.damaged()
	now := time.Now()
	f.repairs.repairEnded(started, !f.full, now)
	f.scheduleRepairLocked(now)
	if wasDamaged && !f.full && f.repairs.inRow == 1 {
		f.log.Info("kernel objects are repaired after another program changed them")
	}
}
