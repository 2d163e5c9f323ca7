package leastconnections

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestScales(t *testing.T) {
	for name, c := range map[string]struct {
		loads    []load
		expected int
		want     []uint16
	}{
		"no endpoint":                           {nil, 10, nil},
		"one":                                   {[]load{{1, 100}}, 10, nil},
		"none open":                             {[]load{{1, 0}, {1, 0}}, 0, nil},
		"as many at each":                       {[]load{{1, 50}, {1, 50}, {1, 50}}, 3, nil},
		"in proportion to weights":              {[]load{{1, 50}, {2, 100}}, 3, nil},
		"few are to come":                       {[]load{{1, 50}, {1, 10}}, 4, []uint16{1, 16}},
		"as many are to come as are missing":    {[]load{{1, 50}, {1, 10}}, 40, []uint16{1, 16}},
		"more are to come":                      {[]load{{1, 50}, {1, 10}}, 120, []uint16{8, 16}},
		"many more":                             {[]load{{1, 50}, {1, 10}}, 1200, nil},
		"a heavy one that is behind":            {[]load{{1, 50}, {4, 40}}, 10, []uint16{1, 16}},
		"as many as chance gives":               {[]load{{1, 410}, {1, 395}}, 10, nil},
		"one, at a light endpoint":              {[]load{{1, 1}, {99, 0}}, 10, nil},
		"few more":                              {[]load{{1, 7}, {1, 0}}, 10, nil},
		"a new one":                             {[]load{{1, 50}, {1, 50}, {1, 0}}, 10, []uint16{1, 1, 16}},
		"two that are behind, to another depth": {[]load{{1, 90}, {1, 20}, {1, 30}}, 30, []uint16{1, 16, 8}},
	} {
		if got := scales(c.loads, c.expected, false); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// Whatever the counts, each number is from 1 to finest, the least loaded endpoint has finest, and of two endpoints the
// one with more connections for its weight never has more.
func TestScalesOfAnything(t *testing.T) {
	dice := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		loads := make([]load, dice.IntN(40))
		for i := range loads {
			loads[i] = load{float64(1 + dice.IntN(1<<dice.IntN(17))), dice.IntN(1 << dice.IntN(20))}
		}
		got := scales(loads, dice.IntN(1<<dice.IntN(20)), false)
		if got == nil {
			continue
		}
		for i := range got {
			for j := range got {
				if got[i] < 1 || got[i] > finest(len(got)) || slices.Max(got) != finest(len(got)) || loads[i].relative() < loads[j].relative() && got[i] < got[j] {
					t.Fatalf("loads %v: %v", loads, got)
				}
			}
		}
	}
}

// crowd is a simulation of clients: in each tick of 10 ms some connect, and each connection lasts a time of its own.
type crowd struct {
	rate     float64              // connections in a tick
	lasts    func(*rand.Rand) int // ticks
	capacity []float64            // weights of the endpoints
	most     float64              // how much of the spread at random may be left
}

// spread returns how far apart the counts are, relative to the weights: the mean distance between the greatest and the
// least, as a share of the mean.
func (c *crowd) spread(choose func(open []int, fresh, tick int, dice *rand.Rand) int) float64 {
	dice := rand.New(rand.NewPCG(1, 2))
	const ticks, warm = 20000, 4000
	ends := make([][]int, ticks)
	open, total, fresh := make([]int, len(c.capacity)), 0.0, 0
	for tick := range ticks {
		for _, endpoint := range ends[tick] {
			open[endpoint]--
		}
		if tick%100 == 0 {
			choose(open, fresh, tick, nil)
			fresh = 0
		}
		for n := poisson(c.rate, dice); n > 0; n-- {
			endpoint := choose(open, 0, tick, dice)
			open[endpoint]++
			fresh++
			if end := tick + 1 + c.lasts(dice); end < ticks {
				ends[end] = append(ends[end], endpoint)
			}
		}
		if tick < warm {
			continue
		}
		most, least, mean := 0.0, math.Inf(1), 0.0
		for i, n := range open {
			of := float64(n) / c.capacity[i]
			most, least, mean = max(most, of), min(least, of), mean+of/float64(len(open))
		}
		total += (most - least) / max(mean, 1)
	}
	return total / (ticks - warm)
}

func poisson(mean float64, dice *rand.Rand) (n int) {
	for p := dice.Float64(); p > math.Exp(-mean); p *= dice.Float64() {
		n++
	}
	return n
}

func (c *crowd) draw(scale []uint16, dice *rand.Rand) int {
	total := 0.0
	weight := func(i int) float64 {
		if scale == nil {
			return c.capacity[i]
		}
		return c.capacity[i] * float64(scale[i])
	}
	for i := range c.capacity {
		total += weight(i)
	}
	at := dice.Float64() * total
	for i := range c.capacity {
		if at -= weight(i); at < 0 {
			return i
		}
	}
	return len(c.capacity) - 1
}

// byWeights is what a Balancer does.
func (c *crowd) byWeights() float64 {
	var set []uint16
	return c.spread(func(open []int, fresh, _ int, dice *rand.Rand) int {
		if dice != nil {
			return c.draw(set, dice)
		}
		loads := make([]load, len(open))
		for i, n := range open {
			loads[i] = load{c.capacity[i], n}
		}
		if wanted := scales(loads, fresh, set != nil); wanted == nil || set == nil || !near(wanted, set) {
			set = wanted
		}
		return 0
	})
}

func (c *crowd) atRandom() float64 {
	return c.spread(func(_ []int, _, _ int, dice *rand.Rand) int {
		if dice == nil {
			return 0
		}
		return c.draw(nil, dice)
	})
}

func (c *crowd) exactly() float64 {
	return c.spread(func(open []int, _, _ int, _ *rand.Rand) int {
		least := 0
		for i := range open {
			if float64(open[i]+1)/c.capacity[i] < float64(open[least]+1)/c.capacity[least] {
				least = i
			}
		}
		return least
	})
}

func crowds() map[string]*crowd {
	exponential := func(mean float64) func(*rand.Rand) int {
		return func(dice *rand.Rand) int { return int(dice.ExpFloat64() * mean) }
	}
	mixed := func(dice *rand.Rand) int { // one in ten lasts a hundred times as long
		if dice.IntN(10) == 0 {
			return int(dice.ExpFloat64() * 2000)
		}
		return int(dice.ExpFloat64() * 20)
	}
	ten, unequal := make([]float64, 10), []float64{1, 1, 2, 4, 8}
	for i := range ten {
		ten[i] = 1
	}
	return map[string]*crowd{
		"connections of 30 s":              {1, exponential(3000), ten, 0.4},
		"of 5 s":                           {5, exponential(500), ten, 0.6},
		"of unequal length":                {3, mixed, ten, 0.6},
		"of unequal length, to weights":    {3, mixed, unequal, 0.8},
		"of 0.2 s, shorter than a reading": {20, exponential(20), ten, 1.02},
	}
}

// LCB-01: long connections are spread much better than at random, and short ones hardly worse.
func TestSpread(t *testing.T) {
	for name, c := range crowds() {
		random, balanced := c.atRandom(), c.byWeights()
		t.Logf("%s: at random %.2f, by weights %.2f, exactly %.2f of the mean", name, random, balanced, c.exactly())
		if balanced > c.most*random {
			t.Errorf("%s: the spread is %.2f, and %.2f at random: want %.1f of that at most", name, balanced, random, c.most)
		}
	}
}

// What is remembered is bounded, and the number of new connections is nearly right however many there are.
func TestNewcomers(t *testing.T) {
	dice := rand.New(rand.NewPCG(7, 8))
	var n newcomers
	var open []uint64
	for reading, size := range []int{100, 100, 100000, 120000, 500000, 1000, 1000, 1000, 1000, 1000, 1000, 50} {
		fresh := size / 4
		if len(open) > size-fresh {
			open = open[len(open)-(size-fresh):]
		}
		for fresh = 0; len(open) < size; fresh++ {
			open = append(open, dice.Uint64())
		}
		n.begin()
		got := 0
		for _, id := range open {
			got += n.see(id)
		}
		if len(n.now) > remembered {
			t.Errorf("reading %d: %d connections are remembered", reading, len(n.now))
		}
		if off := math.Abs(float64(got - fresh)); off > 0.2*float64(fresh)+3*float64(n.mask|n.beforeMask) {
			t.Errorf("reading %d of %d: %d are new, want about %d", reading, size, got, fresh)
		}
	}
	if n.mask != 0 {
		t.Errorf("few are open, but a part is remembered: mask %b", n.mask)
	}
}

func ExampleOptions() {
	_, err := New(Options{Pause: -1})
	fmt.Println(err)
	// Output:
	// least connections: List: nil: want a function that lists open connections, such as conntrack.OpenConnections
	// Pause: -1ns: want 0 or more
}
