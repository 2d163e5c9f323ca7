package leastconnections

import (
	"cmp"
	"math"
	"slices"
)

// load is an endpoint of a service port.
type load struct {
	weight float64 // its share of connections
	open   int     // connections
}

func (l load) relative() float64 { return float64(l.open) / l.weight }

const (
	// maxEndpoints is how many endpoints are balanced. For more, weights cost the engines much.
	maxEndpoints = 128
	// fewest is how many connections an endpoint is away from its share at least before weights change.
	fewest = 8
	// alike is how near the numbers are, relative to the greatest, that need no difference; alikeAgain is the same for
	// weights that differ already.
	alike, alikeAgain = 0.75, 0.9
)

// finest is the greatest number by which weights are multiplied: so many that the numbers add up to 128, the slots
// that package nftables uses exactly, but from 4 to 16.
func finest(endpoints int) uint16 { return uint16(max(4, min(16, maxEndpoints/max(endpoints, 1)))) } //nolint:mnd,gosec // said

// scales returns by which number to multiply the weight of each endpoint, from 1 to finest, if so many connections are
// to come; nil means that weights are right as they are. The endpoints fill like connected vessels: connections go to
// where the fewest are open, up to one level. If weights differ already, smaller differences are enough.
func scales(loads []load, expected int, differ bool) []uint16 {
	if !matter(loads, differ) {
		return nil
	}
	order := slices.Clone(loads)
	slices.SortFunc(order, func(a, b load) int { return cmp.Compare(a.relative(), b.relative()) })
	level, open, weight := 0.0, float64(max(expected, len(loads))), 0.0
	for _, l := range order {
		if weight > 0 && level <= l.relative() {
			break
		}
		open, weight = open+float64(l.open), weight+l.weight
		level = open / weight
	}
	room := func(l load) float64 { return max(0, level-l.relative()) }
	most := room(order[0])
	enough := alike
	if differ {
		enough = alikeAgain
	}
	if room(order[len(order)-1]) >= enough*most {
		return nil
	}
	all := make([]uint16, len(loads))
	for i, l := range loads {
		all[i] = uint16(max(1, float64(finest(len(loads)))*room(l)/most+1./2))
	}
	return all
}

// matter reports whether some endpoint is away from its share of the open connections by fewest or more, and by the
// square root of the share or more: chance alone gives about as much.
func matter(loads []load, differ bool) bool {
	open, weight, part := 0.0, 0.0, 1.0
	for _, l := range loads {
		open, weight = open+float64(l.open), weight+l.weight
	}
	if differ {
		part = 1. / 2
	}
	return len(loads) > 1 && slices.ContainsFunc(loads, func(l load) bool {
		share := open * l.weight / weight
		return math.Abs(float64(l.open)-share) >= part*max(fewest, math.Sqrt(share))
	})
}

// near reports whether a change from one list of numbers to another is not worth a write: no number changes by
// more than a quarter, or by more than one.
func near(a, b []uint16) bool {
	const part = 4
	for i := range a {
		if less, more := min(a[i], b[i]), max(a[i], b[i]); more-less > max(1, more/part) {
			return false
		}
	}
	return true
}

// newcomers finds out how many connections of a family were not there at the reading before. It remembers a part of
// them: those with a hash in which all bits of mask are 0.
type newcomers struct {
	mask, beforeMask uint64
	before, now      map[uint64]struct{}
}

// remembered is how many connections are remembered at most.
const remembered = 1 << 14

// begin begins a reading.
func (n *newcomers) begin() {
	n.before, n.beforeMask, n.now = n.now, n.mask, map[uint64]struct{}{}
	if len(n.before) < remembered/4 { //nolint:mnd // a quarter: twice as many are half of the limit
		n.mask >>= 1
	}
}

// undo forgets a reading that failed.
func (n *newcomers) undo() { n.now, n.mask = n.before, n.beforeMask }

// see returns for how many new connections this one stands.
func (n *newcomers) see(id uint64) int {
	const spread, half = 0x9e3779b97f4a7c15, 32 // Fibonacci hashing: the upper bits depend on all of the ID's
	id *= spread
	id ^= id >> half
	if id&n.mask == 0 {
		n.now[id] = struct{}{}
		for len(n.now) > remembered {
			n.mask = n.mask<<1 | 1
			for id := range n.now {
				if id&n.mask != 0 {
					delete(n.now, id)
				}
			}
		}
	}
	mask := n.mask | n.beforeMask
	if _, known := n.before[id]; known || id&mask != 0 {
		return 0
	}
	return int(mask) + 1 //nolint:gosec // there are not 2^63 connections
}
