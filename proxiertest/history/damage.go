package history

import (
	"math/rand/v2"
	"testing"
)

// TestVerify lets another program change the objects of an engine while no process runs. Verify of an engine
// that has programmed nothing must find each change, and nothing before it; the next process must repair it.
func TestVerify(t *testing.T, planes Planes) {
	t.Helper()
	testDamage(t, planes, Inspect)
}

// TestWatch lets another program change the objects of an engine while a process runs, and asks for no sync: Watch
// must report each change, so that the driver repairs it. An engine without Watch fails.
func TestWatch(t *testing.T, planes Planes) {
	t.Helper()
	testDamage(t, planes, DamageKernel)
}

// testDamage also fails if no change had an effect. While a process runs, a repair may hide the effect.
func testDamage(t *testing.T, planes Planes, kind EventKind) {
	t.Helper()
	seed, _ := Seeds(t, 1)
	d := dice{rand.New(rand.NewPCG(seed, 22))}
	plane, fresh := planes(t, seed)
	if hasSockets(plane) {
		t.Skip("no other program changes the sockets of a process")
	}
	steps := append(d.begin(4), Event{Kind: Converge})
	for range few(10, 100) {
		steps = append(steps, Event{Kind: kind, Damage: d.IntN(1000)}, Event{Kind: Converge})
		if kind == DamageKernel { // after several in a row, repairs wait
			steps = append(steps, Event{Kind: Restart})
		}
	}
	counting := &damageCounter{Plane: plane, t: t}
	if err := Run(t.Context(), counting, fresh, steps, patience); err != nil {
		t.Error(err)
	}
	if kind == Inspect && counting.effective == 0 {
		t.Error("no call of Damage changed what Kernel returns")
	}
}

// damageCounter counts the calls of Damage that had an effect.
type damageCounter struct {
	Plane

	t         *testing.T
	effective int
}

func (c *damageCounter) Damage(number int, objects *Objects) {
	before, err := c.Kernel()
	c.Plane.Damage(number, objects)
	after, afterErr := c.Kernel()
	if err != nil || afterErr != nil {
		c.t.Errorf("Kernel: %v, %v", err, afterErr)
	}
	if before != after {
		c.effective++
	}
}
