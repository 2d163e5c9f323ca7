package cluster

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	seed   = flag.Uint64("seed", 0, "the only seed to run; 0 means new ones")
	keep   = flag.String("keep", "", "indexes of the ops to play, with -seed; empty means all")
	seeds  = flag.Int("seeds", 0, "how many seeds to run, from 1; 0 means new ones for the time of -budget")
	nodes  = flag.Int("nodes", 10, "how many nodes TestLarge has")
	budget = flag.Duration("budget", 10*time.Second, "how long to run new seeds")
)

func TestMain(m *testing.M) {
	flag.Parse()
	debug.SetGCPercent(400) // many short runs with little memory
	os.Exit(m.Run())
}

// TestSeeds plays small clusters.
func TestSeeds(t *testing.T) {
	sum := map[string]int{}
	defer func() { t.Log(happened(sum)) }()
	switch {
	case *seed != 0:
		playSeed(t, *seed, sum)
	case *seeds != 0:
		for i := range *seeds {
			playSeed(t, uint64(i+1), sum)
		}
	default:
		first, played := rand.Uint64N(1<<40), uint64(0)
		for begin := time.Now(); time.Since(begin) < *budget && !t.Failed(); played++ {
			playSeed(t, first+played, sum)
		}
		t.Logf("%d seeds from %d", played, first)
	}
}

func playSeed(t *testing.T, seed uint64, sum map[string]int) {
	t.Helper()
	sc := newScenario(seed)
	if *keep != "" {
		var err error
		if sc, err = sc.keep(*keep); err != nil {
			t.Fatal(err)
		}
	}
	res := sc.run(t)
	for what, count := range res.stats.happened {
		sum[what] += count
	}
	if len(res.violations) == 0 {
		return
	}
	sc = sc.shrink(func(smaller scenario) bool { return len(smaller.run(t).violations) > 0 })
	t.Errorf("seed %d: these ops are enough:\n%s\n%s\ngo test ./internal/cluster -run TestSeeds -seed %d -keep %s",
		seed, sc.story(), strings.Join(sc.run(t).violations, "\n"), seed, sc.indexes())
}

// happened lists what went wrong.
func happened(sum map[string]int) string {
	lines := []string{"what happened:"}
	for _, what := range mustHappen {
		lines = append(lines, fmt.Sprintf("%9d %s", sum[what], what))
	}
	return strings.Join(lines, "\n")
}

// TestFaultsHappen shows that the scenarios have the faults that they are for.
func TestFaultsHappen(t *testing.T) {
	sum := map[string]int{}
	for seed := range uint64(25) {
		playSeed(t, seed+1, sum)
	}
	for _, what := range mustHappen {
		if sum[what] == 0 {
			t.Errorf("25 seeds have no %s", what)
		}
	}
	t.Log(happened(sum))
}

// TestLarge plays one large cluster, without and with faults, and prints how long changes take
// and how much the nodes write.
func TestLarge(t *testing.T) {
	first := *seed
	if first == 0 {
		first = rand.Uint64N(1 << 40)
	}
	for _, faults := range []bool{false, true} {
		t.Run(fmt.Sprintf("faults %v", faults), func(t *testing.T) {
			res := newLargeScenario(first, *nodes, faults).run(t)
			t.Logf("seed %d, %d nodes:\n%s", first, *nodes, res.stats)
			for i := range res.violations[:min(20, len(res.violations))] {
				t.Errorf("seed %d: %s", first, res.violations[i])
			}
			for node, writes := range res.stats.writes {
				if !faults && writes > res.stats.touched[node] {
					t.Errorf("seed %d: node %d writes %d times for %d changed service ports", first, node, writes, res.stats.touched[node])
				}
			}
		})
	}
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
	if len(small.ops) != 1 || !fails(small) {
		t.Errorf("%d ops remain of %d:\n%s", len(small.ops), len(sc.ops), small.story())
	}
	if again, err := sc.keep(small.indexes()); err != nil || !slices.Equal(again.ops, small.ops) {
		t.Errorf("-keep %s plays %v: %v", small.indexes(), again.ops, err)
	}
}
