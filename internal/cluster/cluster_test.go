package cluster

import (
	"flag"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"strings"
	"testing"
	"time"
)

var (
	seed   = flag.Uint64("seed", 0, "the only seed to run; 0 means new ones")
	keep   = flag.String("keep", "", "indexes of the ops to play, with -seed; empty means all")
	seeds  = flag.Int("seeds", 0, "how many seeds to run, from 1; 0 means new ones for the time of -budget")
	budget = flag.Duration("budget", 10*time.Second, "how long to run new seeds")
)

func TestMain(m *testing.M) {
	flag.Parse()
	debug.SetGCPercent(400) // many short runs with little memory
	os.Exit(m.Run())
}

// TestSeeds plays small clusters.
func TestSeeds(t *testing.T) {
	switch {
	case *seed != 0:
		playSeed(t, *seed)
	case *seeds != 0:
		for i := range *seeds {
			playSeed(t, uint64(i+1))
		}
	default:
		first, played := rand.Uint64N(1<<40), uint64(0)
		for begin := time.Now(); time.Since(begin) < *budget && !t.Failed(); played++ {
			playSeed(t, first+played)
		}
		t.Logf("%d seeds from %d", played, first)
	}
}

func playSeed(t *testing.T, seed uint64) {
	t.Helper()
	sc := newScenario(seed)
	if *keep != "" {
		var err error
		if sc, err = sc.keep(*keep); err != nil {
			t.Fatal(err)
		}
	}
	if len(sc.run(t).violations) == 0 {
		return
	}
	sc = sc.shrink(func(smaller scenario) bool { return len(smaller.run(t).violations) > 0 })
	t.Errorf("seed %d: these ops are enough:\n%s\n%s\n%s", seed, sc.story(), strings.Join(sc.run(t).violations, "\n"), sc.command())
}

// TestReplay shows that a seed decides everything.
func TestReplay(t *testing.T) {
	for seed := range uint64(5) {
		if a, b := newScenario(seed+1).run(t), newScenario(seed+1).run(t); a.digest != b.digest || a.digest == 0 {
			t.Errorf("seed %d: digests %x and %x", seed+1, a.digest, b.digest)
		}
	}
}

// TestPlantedFaults shows that the properties catch faults: each one within a few seeds.
func TestPlantedFaults(t *testing.T) {
	for _, fault := range plantedFaults {
		t.Run(fault.name, func(t *testing.T) {
			for seed := range uint64(40) {
				sc := newScenario(seed + 1)
				sc.quirks = fault.quirks
				if violations := sc.run(t).violations; len(violations) > 0 {
					t.Logf("caught by seed %d: %s", seed+1, violations[0])
					return
				}
			}
			t.Error("not caught")
		})
	}
}

// TestShrink shows that a failure comes down to the ops that cause it.
func TestShrink(t *testing.T) {
	sc := newScenario(6)
	for _, fault := range plantedFaults {
		if fault.name == "feed: deletions of Services are lost" {
			sc.quirks = fault.quirks
		}
	}
	fails := func(sc scenario) bool { return len(sc.run(t).violations) > 0 }
	small := sc.shrink(fails)
	if len(small.ops) != 1 || small.ops[0].kind != "recreate" {
		t.Errorf("%d ops remain of %d:\n%s", len(small.ops), len(sc.ops), small.story())
	}
	again, err := newScenario(6).keep("2")
	if err != nil || len(again.ops) != 1 || again.ops[0] != small.ops[0] {
		t.Errorf("%s keeps %v: %v", small.command(), again.ops, err)
	}
}
