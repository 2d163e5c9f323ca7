package ebpf

import (
	"cmp"
	"math/bits"
	"slices"
)

// block is a piece of an arena.
type block struct{ first, size uint32 }

// arena gives out blocks of indices. Sizes are rounded up to powers of two and their halves more
// (1, 2, 3, 4, 6, 8, 12 and so on), so that a block can be used again.
type arena struct {
	size, next uint32
	free       map[uint32][]uint32 // by size, the first indices
}

func newArena(size uint32) *arena { return &arena{size: size, free: map[uint32][]uint32{}} }

// rounded is the size of the block for n indices; n is not 0.
func rounded(n uint32) uint32 {
	power := uint32(1) << bits.Len32(n-1)
	if half := power / 4 * 3; n <= half {
		return half
	}
	return power
}

// allocate returns a block for n indices. ok is false if there is none.
func (a *arena) allocate(n uint32) (b block, ok bool) {
	size := rounded(n)
	if free := a.free[size]; len(free) > 0 {
		a.free[size] = free[:len(free)-1]
		return block{free[len(free)-1], size}, true
	}
	if a.size-a.next < size {
		return block{}, false
	}
	b = block{a.next, size}
	a.next += size
	return b, true
}

// give takes a block back.
func (a *arena) give(b block) {
	if b.size > 0 {
		a.free[b.size] = append(a.free[b.size], b.first)
	}
}

// arenaAround returns an arena in which these blocks are taken. ok is false if they overlap or
// do not fit.
func arenaAround(size uint32, taken []block) (a *arena, ok bool) {
	a = newArena(size)
	slices.SortFunc(taken, func(x, y block) int { return cmp.Compare(x.first, y.first) })
	for _, b := range taken {
		if b.first < a.next || uint64(b.first)+uint64(b.size) > uint64(size) {
			return nil, false
		}
		a.giveRange(a.next, b.first)
		a.next = b.first + b.size
	}
	return a, true
}

// giveRange frees all indices from one to before another, in the largest blocks.
func (a *arena) giveRange(from, to uint32) {
	for from < to {
		size := uint32(1) << (bits.Len32(to-from) - 1)
		if more := size / 2 * 3; size > 1 && more <= to-from {
			size = more
		}
		a.give(block{from, size})
		from += size
	}
}
