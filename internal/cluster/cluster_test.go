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

	"github.com/serviceplane/serviceplane/internal/chance"
)

var (
	seed   = flag.Uint64("seed", 0, "the only seed to run; 0 means new ones")
	keep   = flag.String("keep", "", "indexes of the ops to play, with -seed; empty means all")
	first  = flag.Uint64("first", 1, "the first seed of -seeds")
	seeds  = flag.Uint64("seeds", 0, "how many seeds to run, from -first; 0 means new ones for the time of -budget")
	nodes  = flag.Int("nodes", 5, "how many nodes TestLarge has")
	budget = flag.Duration("budget", time.Second, "how long to run new seeds")
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
			playSeed(t, *first+i, sum)
		}
	default:
		begin, played := rand.Uint64N(1<<40), uint64(0)
		for start := time.Now(); time.Since(start) < *budget && !t.Failed(); played++ {
			playSeed(t, begin+played, sum)
		}
		t.Logf("%d seeds from %d", played, begin)
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
		seed, sc.story(), lines(sc.run(t).violations), seed, sc.indexes())
}

func lines(violations []violation) string {
	var all []string
	for _, v := range violations {
		all = append(all, v.String())
	}
	return strings.Join(all, "\n")
}

// properties lists the properties that do not hold.
func properties(violations []violation) string {
	var all []string
	for _, v := range violations {
		if !slices.Contains(all, v.property) {
			all = append(all, v.property)
		}
	}
	return strings.Join(all, ", ")
}

// happened lists what went wrong.
func happened(sum map[string]int) string {
	lines := []string{"what happened:"}
	for _, what := range mustHappen {
		lines = append(lines, fmt.Sprintf("%9d %s", sum[what], what))
	}
	return strings.Join(lines, "\n")
}

// The scenarios have the faults that they are for.
func TestFaultsHappen(t *testing.T) {
	sum := map[string]int{}
	playSeed(t, 458396722429, sum) // a change comes and goes while a service port waits for its next try
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
	chosen := *seed
	if chosen == 0 {
		chosen = rand.Uint64N(1 << 40)
	}
	for _, faults := range []bool{false, true} {
		t.Run(fmt.Sprintf("faults %v", faults), func(t *testing.T) {
			res := newLargeScenario(chosen, *nodes, faults).run(t)
			t.Logf("seed %d, %d nodes:\n%s", chosen, *nodes, res.stats)
			for i := range res.violations[:min(20, len(res.violations))] {
				t.Errorf("seed %d: %v", chosen, res.violations[i])
			}
			for node, writes := range res.stats.writes {
				if !faults && writes > res.stats.touched[node] {
					t.Errorf("seed %d: node %d writes %d times for %d changed service ports", chosen, node, writes, res.stats.touched[node])
				}
			}
		})
	}
}

// A seed decides everything in a run.
func TestReplay(t *testing.T) {
	for seed := range uint64(5) {
		if a, b := newScenario(seed+1).run(t), newScenario(seed+1).run(t); a.digest != b.digest || a.digest == 0 {
			t.Errorf("seed %d: digests %x and %x", seed+1, a.digest, b.digest)
		}
	}
}

// The properties catch each planted fault within a few seeds.
func TestPlantedFaults(t *testing.T) {
	for _, fault := range chance.Some(t, len(plantedFaults)/3, plantedFaults...) {
		t.Run(fault.name, func(t *testing.T) {
			for seed := range uint64(40) {
				sc := newScenario(seed + 1)
				sc.quirks = fault.quirks
				if violations := sc.run(t).violations; len(violations) > 0 {
					t.Logf("caught by seed %d: %s\n%s", seed+1, properties(violations), violations[0])
					return
				}
			}
			t.Error("not caught")
		})
	}
}

// A failure shrinks to the ops that cause it.
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
