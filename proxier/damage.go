package proxier

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
)

// firstPause is the pause before a Watch that has ended runs again; longestPause is the longest.
const firstPause = time.Second

// watch keeps the engine's Watch running until ctx ends.
func (f *family) watch(ctx context.Context) {
	pause := firstPause
	for ctx.Err() == nil {
		started := time.Now()
		f.locked(func() { f.watcher.started(started) })
		err := f.can.Watch(ctx, f.damaged)
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
	first, known := d != (Damage{}) && f.repairs.beginsRow(now), f.repairs.pending()
	f.repairs.damage(d, now)
	wait := max(f.repairs.due().Sub(now), 0)
	f.mu.Unlock()
	if !known { // otherwise a sync comes when the repair is due
		f.trigger()
	}
	if first {
		f.log.Warn("another program changed our kernel objects", zap.Stringer("what", d), zap.Duration("repaired in", wait))
	}
}

// portDamage is what other programs did to a service port. Its damages are a burst until it is left
// alone for shortestQuiet.
type portDamage struct {
	last    time.Time // zero: never
	waiting bool      // for a sync
	taken   bool      // by a sync that has not succeeded yet
	logged  bool      // the damage; its repair not yet
}

// consume reports whether there is damage for a sync to repair.
func (d *portDamage) consume() bool {
	if !d.waiting {
		return false
	}
	d.waiting, d.taken = false, true
	return true
}

func (d *portDamage) pending() bool { return d.waiting || d.taken }

func (d *portDamage) isOver(now time.Time) bool {
	return !d.last.IsZero() && !d.pending() && !d.logged && now.Sub(d.last) > shortestQuiet
}

// damagedNow makes the next sync program a service port again. first says that a burst begins, of which
// so many last.
func (p *ports) damagedNow(name changetracker.ServicePortName, now time.Time) (known, first bool, bursts int) {
	r := p.get(name)
	d := &r.damage
	if known, first = d.waiting, d.last.IsZero() || d.isOver(now); first {
		bursts = p.bursts(now) + 1
		d.logged = bursts <= mostServiceLines
	}
	d.last, d.waiting = now, true
	p.byName[name] = r // bursts may have forgotten it
	p.schedule(r, now)
	return known, first, bursts
}

// bursts counts the bursts that last, and forgets the others.
func (p *ports) bursts(now time.Time) (last int) {
	for _, r := range p.byName {
		if r.damage.isOver(now) {
			r.damage = portDamage{}
			p.forgetIfWell(r)
		} else if !r.damage.last.IsZero() {
			last++
		}
	}
	return last
}

// repaired ends the repair of a service port, and reports whether to log it: the first one of a burst
// whose damage was logged.
func (p *ports) repaired(name changetracker.ServicePortName) bool {
	r := p.byName[name]
	if r == nil {
		return false
	}
	d := &r.damage
	logs := d.logged && !d.waiting
	d.taken, d.logged = false, d.logged && d.waiting
	return logs
}

// repairing reports whether a service port has to be repaired.
func (p *ports) repairing() bool {
	for _, r := range p.byName {
		if r.damage.pending() {
			return true
		}
	}
	return false
}

// damagedPort makes the next sync program a service port again. It logs the first damage of a burst.
func (f *family) damagedPort(d *Damage) {
	f.mu.Lock()
	known, first, bursts := f.ports.damagedNow(d.Service, time.Now())
	f.mu.Unlock()
	if !known {
		f.trigger()
	}
	switch {
	case first && bursts <= mostServiceLines:
		f.log.Warn("service port was damaged, will be programmed again", append(serviceFields(d.Service), zap.Stringer("what", *d))...)
	case first && bursts == mostServiceLines+1:
		f.log.Warn("further service ports were damaged, will be programmed again")
	}
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
	if wasDamaged && !f.full && f.repairs.inRow == 1 {
		f.log.Info("kernel objects are repaired after another program changed them")
	}
}
