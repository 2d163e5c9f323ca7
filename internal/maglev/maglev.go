// Package maglev builds the lookup tables of Maglev, a consistent hash: each slot of a table holds
// an endpoint, and a client goes to the endpoint of the slot that its hash selects. It is for who
// writes an engine with hashed endpoints.
//
// A table depends only on the endpoints, their weights and its size, not on their history, so
// that all nodes that know the same endpoints have the same table. If one of N endpoints of
// equal weight goes, its 1/N of the slots change, and few others.
//
// Source: D. E. Eisenbud and others, "Maglev: A Fast and Reliable Software Network Load
// Balancer", NSDI 2016, section 3.4.
package maglev

import (
	"encoding/binary"
	"math"
	"net/netip"
	"slices"
)

// MaxEndpoints is the greatest number of endpoints in a table: each needs a slot.
const MaxEndpoints = largest

// sizes are prime, as the permutations need. Up to so many endpoints, at most 2 % of the slots
// move beside those of an endpoint that goes.
var sizes = []struct{ upTo, size int }{{0, 7}, {0, 13}, {0, 61}, {2, 251}, {0, 1021}, {16, 4093}, {160, 16381}, {MaxEndpoints, largest}} // read-only

const largest = 65521

// Size returns the size of the table for a number of endpoints: 251, 4,093, 16,381 or 65,521
// slots. A table of another size sends most clients to other endpoints, so there are few
// sizes: it changes above 2, 16 and 160 endpoints.
//
// If most is not 0, the table has at most so many slots, or as few as the endpoints allow: the size is 7,
// 13, 61, 251, 1,021, 4,093, 16,381 or 65,521. The fewer slots an endpoint has, the less even are the shares.
func Size(endpoints, most int) int {
	endpoints, size := max(endpoints, 1), largest
	for _, s := range slices.Backward(sizes) {
		if s.size < endpoints {
			break
		}
		if endpoints <= s.upTo || most != 0 && size > most {
			size = s.size
		}
	}
	return size
}

// Table returns a table with Size(len(endpoints), most) slots: for each slot, the index of its
// endpoint. The endpoints are sorted and have no duplicates. Their weights are in the same
// order, each at least 1; nil means that all are equal. Endpoints after the first
// MaxEndpoints get no slots. Without endpoints the table is empty.
func Table(endpoints []netip.AddrPort, weights []uint16, most int) []uint16 {
	endpoints = endpoints[:min(len(endpoints), MaxEndpoints)]
	if len(endpoints) == 0 {
		return nil
	}
	size := uint32(Size(len(endpoints), most))
	all, greatest := permutations(endpoints, weights, size)
	// In each round, an endpoint takes the next free slot of its permutation. One with half of
	// the greatest weight takes its turn in every second round.
	const free = math.MaxUint16 // more than any index
	table := slices.Repeat([]uint16{free}, int(size))
	for left := size; ; {
		for i := range all {
			p := &all[i]
			if p.credit += p.weight; p.credit < greatest {
				continue
			}
			p.credit -= greatest
			next := p.next
			for table[next] != free {
				if next += p.skip; next >= size {
					next -= size
				}
			}
			table[next], p.next = uint16(i), next
			if left--; left == 0 {
				return table
			}
		}
	}
}

// permutation is the order in which an endpoint prefers slots: every skip-th, which is all of
// them, as the size is prime.
type permutation struct {
	next, skip     uint32
	weight, credit uint32 // for its next turn
}

func permutations(endpoints []netip.AddrPort, weights []uint16, size uint32) (all []permutation, greatest uint32) {
	all, greatest = make([]permutation, len(endpoints)), 1
	for i, e := range endpoints {
		all[i] = permute(e, size)
		if weights != nil {
			all[i].weight = uint32(weights[i])
			greatest = max(greatest, all[i].weight)
		}
	}
	return all, greatest
}

// permute returns the permutation of an endpoint. It must never change: during an upgrade,
// nodes of two versions have to agree.
func permute(e netip.AddrPort, size uint32) permutation {
	h := hash(e)
	return permutation{weight: 1, next: uint32(h % uint64(size)), skip: uint32(h>>32%uint64(size-1)) + 1}
}

// hash is FNV-1a of the address, as 16 bytes, and the port, mixed as splitmix64 does.
func hash(e netip.AddrPort) uint64 {
	addr := e.Addr().As16()
	var key [18]byte
	copy(key[:], addr[:])
	binary.BigEndian.PutUint16(key[16:], e.Port())
	h := uint64(0xcbf29ce484222325)
	for _, b := range key {
		h = (h ^ uint64(b)) * 0x100000001b3
	}
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
