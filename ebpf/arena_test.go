package ebpf

import (
	"math/rand/v2"
	"testing"
)

// TestArena takes and gives back blocks at random: none overlap, and an arena that is made around
// them gives out the rest.
func TestArena(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	const size = 4096
	a := newArena(size)
	owner := make([]int, size)
	blocks := map[int]block{}
	mark := func(b block, from, to int) {
		for i := b.first; i < b.first+b.size; i++ {
			if owner[i] != from {
				t.Fatalf("index %d of block %v belongs to %d, want %d", i, b, owner[i], from)
			}
			owner[i] = to
		}
	}
	for id := 1; id < 20_000; id++ {
		if n := uint32(1 + random.IntN(40)); random.IntN(2) == 0 {
			if b, ok := a.allocate(n); ok {
				if b.size < n || b.size >= 2*n && n > 1 {
					t.Fatalf("block for %d has size %d", n, b.size)
				}
				mark(b, 0, id)
				blocks[id] = b
			}
		} else {
			for other, b := range blocks {
				mark(b, other, 0)
				a.give(b)
				delete(blocks, other)
				break
			}
		}
		if id%1000 == 0 {
			var taken []block
			for _, b := range blocks {
				taken = append(taken, b)
			}
			var ok bool
			if a, ok = arenaAround(size, taken); !ok {
				t.Fatal("the arena refuses its own blocks")
			}
		}
	}
	for _, overlapping := range [][]block{{{0, 4}, {3, 1}}, {{size - 1, 2}}, {{1 << 31, 1 << 31}, {0, 1}}} {
		if _, ok := arenaAround(size, overlapping); ok {
			t.Errorf("blocks %v are accepted", overlapping)
		}
	}
}
