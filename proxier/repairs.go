package proxier

import (
	"fmt"
	"time"
)

// repairs decides when to repair objects that another program has changed: at once, but while they are
// changed again and again, with pauses in which a repair's time is a small share.
type repairs struct {
	seen     damageCounts // so far
	repaired damageCounts // seen when the last successful repair started
	last     Damage       // the last damage, at lastTime
	lastTime time.Time
	// inRow counts the consecutive repairs that each followed soon after the previous
	// one. The last one ended at ended; since is the time of the damage that began the row.
	inRow        int
	ended, since time.Time
	took         time.Duration // the last one
}

// damageCounts counts the reasons for a full sync, and the damages among them.
type damageCounts struct{ reasons, damages int }

const (
	// immediateRepairs is how many repairs in a row do not wait.
	immediateRepairs = 3
	// pausePerRepair times the duration of a repair is the pause after it: a tenth of the time is spent.
	pausePerRepair = 9
	shortestPause  = 100 * time.Millisecond
	longestPause   = time.Minute
	// shortestQuiet is the shortest time without damage that ends a row of repairs.
	shortestQuiet = 10 * time.Second
)

// damage counts a change by another program. The zero Damage means a possible change.
func (r *repairs) damage(d Damage, now time.Time) {
	r.seen.reasons++
	if d != (Damage{}) {
		r.seen.damages++
		r.last, r.lastTime = d, now
	}
}

// pending reports whether a full sync is needed, because of real or possible damage.
func (r *repairs) pending() bool { return r.seen.reasons > r.repaired.reasons }

// damaged reports whether there is damage to repair.
func (r *repairs) damaged() bool { return r.seen.damages > r.repaired.damages }

// brokenSince is since when objects are damaged, zero if they are not: for all of a row, while another
// program undoes each repair.
func (r *repairs) brokenSince() time.Time {
	switch {
	case !r.damaged():
		return time.Time{}
	case r.pause() > 0:
		return r.since
	default:
		return r.lastTime
	}
}

// beginsRow reports whether a damage at now does not follow soon after another one.
func (r *repairs) beginsRow(now time.Time) bool {
	return !r.damaged() && (r.inRow == 0 || now.Sub(r.ended) > r.quiet())
}

// repairEnded records the end of a repair that started with these counts, at began. A failed repair
// counts in the row too, since another program may have interfered with it.
func (r *repairs) repairEnded(started damageCounts, succeeded bool, began, now time.Time) {
	if r.damaged() {
		if r.inRow == 0 || r.lastTime.Sub(r.ended) > r.quiet() {
			r.inRow, r.since = 0, r.lastTime
		}
		r.inRow++
		r.ended, r.took = now, now.Sub(began)
	}
	if succeeded {
		r.repaired = started
	}
}

// pause is the time to wait after the last repair.
func (r *repairs) pause() time.Duration {
	if r.inRow < immediateRepairs {
		return 0
	}
	return min(max(pausePerRepair*r.took, shortestPause), longestPause)
}

// quiet is the time without damage that ends the row.
func (r *repairs) quiet() time.Duration { return max(shortestQuiet, 2*r.pause()) }

// due is when to repair; a time in the past means at once.
func (r *repairs) due() time.Time { return r.ended.Add(r.pause()) }

// condition returns ConditionContested while another program keeps changing objects.
func (r *repairs) condition(now time.Time) (cond Condition, lasts bool) {
	if r.pause() == 0 || !r.damaged() && now.Sub(r.ended) > r.quiet() {
		return Condition{}, false
	}
	return Condition{
		Type: ConditionContested, Since: r.since,
		Message: fmt.Sprintf("%s; %d repairs in a row, now at most one in %v: stop that program, or give this one other Names", r.last, r.inRow, r.pause()),
	}, true
}
