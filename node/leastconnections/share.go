package leastconnections

import (
	"cmp"
	"slices"
)

// load is an endpoint of a service port.
type load struct {
	weight float64 // its share of connections
	open   int     // connections
}

func (l load) relative() float64 { return float64(l.open) / l.weight }

const (
	// finest is the greatest number by which a weight is multiplied.
	finest = 16
	// alike is how near the numbers are, relative to the greatest, that need no difference.
	alike = 0.75
)

// scales returns by which number to multiply the weight of each endpoint, from 1 to finest, if so many connections are
// to come; nil means that weights are right as they are. The endpoints fill like connected vessels: connections go to
// where the fewest are open, up to one level.
func scales(loads []load, expected int) []uint16 {
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
	most := 0.0
	if len(order) > 0 {
		most = room(order[0])
	}
	if len(order) < 2 || room(order[len(order)-1]) >= alike*most {
		return nil
	}
	all := make([]uint16, len(loads))
	for i, l := range loads {
		all[i] = uint16(max(1, finest*room(l)/most+1./2))
	}
	return all
}

// near reports whether a change from one list to the other is not worth a write: no number of the n changes by more
// than a quarter, or by more than one.
func near(a, b []uint16, n int) bool {
	const part = 4
	of := func(list []uint16, i int) uint16 {
		if list == nil {
			return finest
		}
		return list[i]
	}
	for i := range n {
		if less, more := min(of(a, i), of(b, i)), max(of(a, i), of(b, i)); more-less > max(1, more/part) {
			return false
		}
	}
	return true
}

// newcomers finds out how many connections of a family were not there at the reading before. It remembers a part of
// them: those with an ID in which all bits of mask are 0.
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
