package proxier

import (
	"slices"
	"strings"
	"testing"
	"time"
)

var tableGone = Damage{Object: "all of table ip t", By: "nft (process 7)"}

// TestRepairsInARowComeLessAndLessOften: the damage returns after each repair.
func TestRepairsInARowComeLessAndLessOften(t *testing.T) {
	for what, succeeded := range map[string]bool{"repaired": true, "repair fails": false} {
		c, now := repairs{}, time.Now()
		var waits []time.Duration
		for range 12 {
			c.damage(tableGone, now)
			wait := max(c.due().Sub(now), 0)
			waits = append(waits, wait)
			now = now.Add(wait)
			c.repairEnded(c.seen, succeeded, now)
		}
		want := []time.Duration{0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60}
		for i := range want {
			want[i] *= time.Second
		}
		if !slices.Equal(waits, want) {
			t.Errorf("%s: waits %v, want %v", what, waits, want)
		}
	}
}

// TestARareDamageIsRepairedAtOnce, however often it occurs.
func TestARareDamageIsRepairedAtOnce(t *testing.T) {
	c, now := repairs{}, time.Now()
	for i := range 20 {
		now = now.Add(shortestQuiet + time.Second)
		c.damage(tableGone, now)
		if wait := c.due().Sub(now); wait > 0 {
			t.Fatalf("damage %d waits for %v, want none", i, wait)
		}
		c.repairEnded(c.seen, true, now)
		if _, lasts := c.condition(now); lasts {
			t.Fatalf("damage %d makes a condition, want none", i)
		}
	}
}

// TestARowOfRepairsEnds after a quiet time, and the next one begins without a pause.
func TestARowOfRepairsEnds(t *testing.T) {
	c, began := repairs{}, time.Now()
	now := began
	for range 6 {
		c.damage(tableGone, now)
		now = now.Add(max(c.due().Sub(now), 0))
		c.repairEnded(c.seen, true, now)
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
	c.repairEnded(c.seen, true, now)
	c.damage(tableGone, now)
	if wait := c.due().Sub(now); wait > 0 {
		t.Errorf("second damage of a new row waits for %v, want none", wait)
	}
}

// TestDamageDuringARepairIsRepairedToo: the repair may have read the object before it.
func TestDamageDuringARepairIsRepairedToo(t *testing.T) {
	c, now := repairs{}, time.Now()
	c.damage(tableGone, now)
	began := c.seen
	c.damage(tableGone, now)
	c.repairEnded(began, true, now)
	if !c.pending() || !c.damaged() {
		t.Error("nothing is pending after a repair that the second damage may have escaped")
	}
	c.repairEnded(c.seen, true, now)
	if c.pending() || c.damaged() {
		t.Error("still pending after the second repair")
	}
}
