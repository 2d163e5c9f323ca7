package proxier

import (
	"fmt"
	"time"
)

// contest decides when to repair what somebody else has changed: at once, but
// less and less often while it happens again and again.
type contest struct {
	seen     account
	repaired account
	last     Damage // the last damage, at lastTime
	lastTime time.Time
	// inRow counts the attempts to repair that came soon after the one before. The
	// last one ended at ended, the row began at since.
	inRow        int
	ended, since time.Time
}

// account counts the reasons to look at everything, and the damages among them.
type account struct{ reasons, damages int }

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
func (c *contest) damage(d Damage, now time.Time) {
	c.seen.reasons++
	if d != (Damage{}) {
		c.seen.damages++
		c.last, c.lastTime = d, now
	}
}

// pending says that there is something to repair, or to look at.
func (c *contest) pending() bool { return c.seen.reasons > c.repaired.reasons }

// damaged says that there is something to repair.
func (c *contest) damaged() bool { return c.seen.damages > c.repaired.damages }

// attempt notes the end of a repair that began with an account. One that failed
// counts in the row too, since somebody may have interfered with it.
func (c *contest) attempt(began account, succeeded bool, now time.Time) {
	if c.damaged() {
		if c.inRow == 0 || c.lastTime.Sub(c.ended) > c.row() {
			c.inRow, c.since = 0, c.lastTime
		}
		c.inRow++
		c.ended = now
	}
	if succeeded {
		c.repaired = began
	}
}

// pause is how long to leave things as they are after the last repair.
func (c *contest) pause() time.Duration {
	doublings := c.inRow - repairsAtOnce
	if doublings < 0 {
		return 0
	}
	return min(firstPause<<min(doublings, 10), longestPause)
}

// row is how soon after a repair a damage continues the row.
func (c *contest) row() time.Duration { return max(soon, 2*c.pause()) }

// due is when to repair; the past means at once.
func (c *contest) due() time.Time { return c.ended.Add(c.pause()) }

// condition is what to tell the operator while the contest lasts.
func (c *contest) condition(now time.Time) (cond Condition, lasts bool) {
	if c.pause() == 0 || !c.damaged() && now.Sub(c.ended) > c.row() {
		return Condition{}, false
	}
	return Condition{
		Type: ConditionContested, Since: c.since,
		Message: fmt.Sprintf("%s; %d repairs in a row, now at most one in %v", c.last, c.inRow, c.pause()),
	}, true
}
