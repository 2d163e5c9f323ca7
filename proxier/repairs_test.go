package proxier

import (
	"slices"
	"strings"
	"testing"
	"time"
)

var tableGone = Damage{Object: "all of table ip t", By: "nft (process 7)"}

// TestRepairsInARowCostATenth: the damage returns after each repair.
func TestRepairsInARowCostATenth(t *testing.T) {
	for what, succeeded := range map[string]bool{"repaired": true, "repair fails": false} {
		c, now := repairs{}, time.Now()
		var waits []time.Duration
		for _, took := range []time.Duration{0, 0, 0, 340 * time.Millisecond, 50 * time.Millisecond, time.Hour, time.Millisecond, 0} {
			c.damage(tableGone, now)
			wait := max(c.due().Sub(now), 0)
			waits = append(waits, wait)
			now = now.Add(wait + took)
			c.repairEnded(c.seen, succeeded, now.Add(-took), now)
		}
		want := []time.Duration{0, 0, 0, shortestPause, 3060 * time.Millisecond, 450 * time.Millisecond, longestPause, shortestPause}
		if !slices.Equal(waits, want) {
			t.Errorf("%s: waits %v, want %v", what, waits, want)
		}
	}
}

// A rare damage is repaired at once, however often it occurs.
func TestARareDamageIsRepairedAtOnce(t *testing.T) {
	c, now := repairs{}, time.Now()
	for i := range 20 {
		now = now.Add(shortestQuiet + time.Second)
		c.damage(tableGone, now)
		if wait := c.due().Sub(now); wait > 0 {
			t.Fatalf("damage %d waits for %v, want none", i, wait)
		}
		c.repairEnded(c.seen, true, now, now)
		if _, lasts := c.condition(now); lasts {
			t.Fatalf("damage %d makes a condition, want none", i)
		}
	}
}

// A row of repairs ends after a quiet time, and the next one begins without a pause.
func TestARowOfRepairsEnds(t *testing.T) {
	c, began := repairs{}, time.Now()
	now := began
	for range 6 {
		c.damage(tableGone, now)
		now = now.Add(max(c.due().Sub(now), 0))
		c.repairEnded(c.seen, true, now, now)
	}
	cond, lasts := c.condition(now)
	if !lasts || cond.Type != ConditionContested || !cond.Since.Equal(began) || !strings.Contains(cond.Message, tableGone.String()) {
		t.Errorf("condition %+v, %v; want contested since the first damage, with the last one", cond, lasts)
	}
	now = now.Add(c.quiet() + time.Second)
	if cond, lasts := c.condition(now); lasts {
		t.Errorf("condition %+v after a quiet time, want none", cond)
	}
	c.damage(tableGone, now)
	c.repairEnded(c.seen, true, now, now)
	c.damage(tableGone, now)
	if wait := c.due().Sub(now); wait > 0 {
		t.Errorf("second damage of a new row waits for %v, want none", wait)
	}
}

// A data plane is broken from the first damage of a row on, so that short repairs between do not hide it, and not
// when the last damage is repaired.
func TestADataPlaneIsBrokenWhileDamageReturns(t *testing.T) {
	c, began := repairs{}, time.Now()
	for now := began; now.Before(began.Add(time.Hour)); now = now.Add(time.Minute) {
		c.damage(tableGone, now)
		if since := c.brokenSince(); now.Sub(began) > 3*time.Minute && !since.Equal(began) || since.After(now) || since.IsZero() {
			t.Fatalf("damaged %v after the first time: broken since %v, want since the first", now.Sub(began), since.Sub(began))
		}
		c.repairEnded(c.seen, true, now.Add(40*time.Second), now.Add(50*time.Second))
		if since := c.brokenSince(); !since.IsZero() {
			t.Fatalf("repaired: broken since %v, want not", since)
		}
	}
}

// TestDamageDuringARepairIsRepairedToo: the repair may have read the object before it.
func TestDamageDuringARepairIsRepairedToo(t *testing.T) {
	c, now := repairs{}, time.Now()
	c.damage(tableGone, now)
	began := c.seen
	c.damage(tableGone, now)
	c.repairEnded(began, true, now, now)
	if !c.pending() || !c.damaged() {
		t.Error("nothing is pending after a repair that the second damage may have escaped")
	}
	c.repairEnded(c.seen, true, now, now)
	if c.pending() || c.damaged() {
		t.Error("still pending after the second repair")
	}
}
