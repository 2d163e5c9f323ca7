package nftables

import (
	"iter"
	"slices"
)

// slotList is an immutable list of endpoints in parts. All parts but the last have partSlots. Versions of a
// long list share the parts that are equal, so that a difference is found without a look at all.
type slotList [][]target

const partSlots = 128

// slotsOf takes over a list.
func slotsOf(list []target) slotList {
	if len(list) == 0 {
		return nil
	}
	s := make(slotList, 0, (len(list)+partSlots-1)/partSlots)
	for part := range slices.Chunk(list, partSlots) {
		s = append(s, part)
	}
	return s
}

func (s slotList) len() int {
	if len(s) == 0 {
		return 0
	}
	return (len(s)-1)*partSlots + len(s[len(s)-1])
}

func (s slotList) at(i int) target { return s[i/partSlots][i%partSlots] }

func (s slotList) all() iter.Seq2[int, target] {
	return func(yield func(int, target) bool) {
		for n, part := range s {
			for i := range part {
				if !yield(n*partSlots+i, part[i]) {
					return
				}
			}
		}
	}
}

// with returns a list of another size, with other targets in some slots, which are sorted. They
// include all slots that s does not have.
func (s slotList) with(size int, at []int, targets []target) slotList {
	next := make(slotList, (size+partSlots-1)/partSlots)
	copy(next, s)
	for n := range next {
		first, length := n*partSlots, min(size-n*partSlots, partSlots)
		if i, _ := slices.BinarySearch(at, first); i < len(at) && at[i] < first+length {
			own := make([]target, length)
			copy(own, next[n])
			next[n] = own
		}
		next[n] = next[n][:length]
	}
	for i, slot := range at {
		next[slot/partSlots][slot%partSlots] = targets[i]
	}
	return next
}

// diffSlots visits the slots in which two lists differ, in order, with nil for a slot that one of them
// does not have. Parts that they share are the same.
func diffSlots(was, is slotList, visit func(i int, old, now *target)) {
	for n := range max(len(was), len(is)) {
		a, b := was.part(n), is.part(n)
		if len(a) > 0 && len(a) == len(b) && &a[0] == &b[0] {
			continue
		}
		for i := range max(len(a), len(b)) {
			var old, now *target
			if i < len(a) {
				old = &a[i]
			}
			if i < len(b) {
				now = &b[i]
			}
			if old == nil || now == nil || *old != *now {
				visit(n*partSlots+i, old, now)
			}
		}
	}
}

func (s slotList) part(n int) []target {
	if n < len(s) {
		return s[n]
	}
	return nil
}
