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

// firstPause is the pause before a Watcher that has ended runs again; longestPause is the longest.
const firstPause = time.Second

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

// damagedPort is a service port that another program changed. Its damages are a burst until it is
// left alone for shortestQuiet.
type damagedPort struct {
	last    time.Time
	waiting bool // for a sync
	taken   bool // by a sync that has not succeeded yet
	logged  bool // the damage; its repair not yet
}

// pending reports whether a sync has to repair it.
func (d *damagedPort) pending() bool { return d.waiting || d.taken }

func (d *damagedPort) ended(now time.Time) bool {
	return !d.pending() && !d.logged && now.Sub(d.last) > shortestQuiet
}

// damagedPort makes the next sync program a service port again. It logs the first damage of a burst.
func (f *family) damagedPort(d *Damage) {
	now := time.Now()
	f.mu.Lock()
	maps.DeleteFunc(f.damagedPorts, func(_ changetracker.ServicePortName, port *damagedPort) bool { return port.ended(now) })
	port := f.damagedPorts[d.Service]
	first := port == nil
	if first {
		port = &damagedPort{logged: len(f.damagedPorts) < mostServiceLines}
		f.damagedPorts[d.Service] = port
	}
	known, ports := port.waiting, len(f.damagedPorts)
	port.last, port.waiting = now, true
	f.mu.Unlock()
	if !known {
		f.trigger()
	}
	switch {
	case first && ports <= mostServiceLines:
		f.log.Warn("service port was damaged, will be programmed again", append(serviceFields(d.Service), zap.Stringer("what", *d))...)
	case first && ports == mostServiceLines+1:
		f.log.Warn("further service ports were damaged, will be programmed again")
	}
}

// takeDamagedPorts returns the service ports that are to be repaired.
func (f *family) takeDamagedPorts() (names []changetracker.ServicePortName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, port := range f.damagedPorts {
		if port.pending() {
			port.waiting, port.taken = false, true
			names = append(names, name)
		}
	}
	return names
}

// repairedPorts ends the repairs that a sync has done, and logs the first one of each burst whose
// damage was logged. failed are the service ports that the sync could not program.
func (f *family) repairedPorts(failed []*ServiceError) {
	var repaired []changetracker.ServicePortName
	f.locked(func() {
		for name, port := range f.damagedPorts {
			port.taken = false
			if port.logged && !port.waiting && findFailure(failed, &ServiceError{Name: name}) == nil {
				port.logged = false
				repaired = append(repaired, name)
			}
		}
	})
	slices.SortFunc(repaired, changetracker.ServicePortName.Compare)
	for _, name := range repaired {
		f.log.Info("service port is repaired after it was damaged", serviceFields(name)...)
	}
}

// portRepairsPendingLocked reports whether a service port has to be repaired.
func (f *family) portRepairsPendingLocked() bool {
	for _, port := range f.damagedPorts {
		if port.pending() {
			return true
		}
	}
	return false
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

// fullSyncEnded records the end of a full sync that started with these counts, at began.
func (f *family) fullSyncEnded(started damageCounts, began time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	wasDamaged := f.repairs.damaged()
	now := time.Now()
	f.repairs.repairEnded(started, !f.full, began, now)
	f.scheduleRepairLocked(now)
	if wasDamaged && !f.full && f.repairs.inRow == 1 {
		f.log.Info("kernel objects are repaired after another program changed them")
	}
}
