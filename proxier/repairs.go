package proxier

import (
	"fmt"
	"time"
)

// repairs decides when to repair what somebody else has changed: at once, but
// less and less often while it happens again and again.
type repairs struct {
	seen     damageCounts
	repaired damageCounts
	last     Damage // the last damage, at lastTime
	lastTime time.Time
	// inRow counts the attempts to repair that came soon after the one before. The
	// last one ended at ended, the row began at since.
	inRow        int
	ended, since time.Time
}

// damageCounts counts the reasons to look at everything, and the damages among them.
type damageCounts struct{ reasons, damages int }

const (
	// repairsAtOnce is how many repairs in a row do not wait.
	repairsAtOnce = 3
	firstPause    = time.Second
	longestPause  = time.Minute
	// soon is the least time without damage that ends a row of repairs.
	soon = 10 * time.Second
)

// damage notes that somebody changed something. The zero Damage says that somebody
// may have.
func (r *repairs) damage(d Damage, now time.Time) {
	r.seen.reasons++
	if d != (Damage{}) {
		r.seen.damages++
		r.last, r.lastTime = d, now
	}
}

// pending says that there is something to repair, or to look at.
func (r *repairs) pending() bool { return r.seen.reasons > r.repaired.reasons }

// damaged says that there is something to repair.
func (r *repairs) damaged() bool { return r.seen.damages > r.repaired.damages }

// attempt notes the end of a repair that began with these counts. One that failed
// counts in the row too, since somebody may have interfered with it.
func (r *repairs) attempt(began damageCounts, succeeded bool, now time.Time) {
	if r.damaged() {
		if r.inRow == 0 || r.lastTime.Sub(r.ended) > r.window() {
			r.inRow, r.since = 0, r.lastTime
		}
		r.inRow++
		r.ended = now
	}
	if succeeded {
		r.repaired = began
	}
}

// pause is how long to leave things as they are after the last repair.
func (r *repairs) pause() time.Duration {
	doublings := r.inRow - repairsAtOnce
	if doublings < 0 {
		return 0
	}
	return min(firstPause<<min(doublings, 10), longestPause)
}

// window is how soon after a repair a damage continues the row.
func (r *repairs) window() time.Duration { return max(soon, 2*r.pause()) }

// due is when to repair; the past means at once.
func (r *repairs) due() time.Time { return r.ended.Add(r.pause()) }

// condition is what to tell the operator while somebody keeps changing things.
func (r *repairs) condition(now time.Time) (cond Condition, lasts bool) {
	if r.pause() == 0 || !r.damaged() && now.Sub(r.ended) > r.window() {
		return Condition{}, false
	}
	return Condition{
		Type: ConditionContested, Since: r.since,
		Message: fmt.Sprintf("%s; %d repairs in a row, now at most one in %v", r.last, r.inRow, r.pause()),
	}, true
}
