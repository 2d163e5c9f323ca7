package nftables

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/maglev"
)

// balanced is the part of a service port that has weights or a consistent hash.
type balanced struct {
	choice choice
	// distinct are the endpoints of each scope once, with session affinity.
	distinct [2]slotList
	// hashed is what the slots of each scope were computed from, with a consistent hash.
	hashed [2]*hashed
}

func (p *placed) choice() choice {
	if p.balanced == nil {
		return atRandom
	}
	return p.balanced.choice
}

func (p *placed) hashed(scope int) *hashed {
	if p == nil || p.balanced == nil {
		return nil
	}
	return p.balanced.hashed[scope]
}

// hashed is what the slots of a consistent hash are computed from.
type hashed struct {
	endpoints []netip.AddrPort
	weights   []uint16
	most      int // slots
}

func (h *hashed) equal(o *hashed) bool {
	return h != nil && h.most == o.most && slices.Equal(h.endpoints, o.endpoints) && slices.Equal(h.weights, o.weights)
}

// placeScope gives the endpoints of a scope their slots.
func (pl placer) placeScope(p, prev *placed, s *desired.Service, scope int) {
	from, weights := s.Endpoints(indexScope(scope)), s.Weights(indexScope(scope))
	if most := pl.limit(s); from.Len() > most {
		from = desired.EndpointsOf(from.Slice()[:most]...)
		weights = weights[:min(len(weights), most)]
	}
	choice := choiceOf(s, pl.traits)
	if choice != atRandom || weights != nil {
		p.balanced = cmp.Or(p.balanced, &balanced{choice: choice})
	}
	switch {
	case from.Len() == 0 || pl.holds != nil:
		return
	case from.Len() == 1 || p.balanced == nil || choice == atRandom && weights == nil:
		pl.placeOnce(p, prev, from, scope)
		return
	case choice == atRandom:
		p.lists[scope] = pl.arrange(prev.list(scope), from.Slice(), shares(weights, s.MaxSlots()), scope)
	default:
		h := &hashed{from.Slice(), weights, s.MaxSlots()}
		p.balanced.hashed[scope] = h
		if prev.hashed(scope).equal(h) && pl.numbersAs(prev) {
			p.lists[scope], p.balanced.distinct[scope] = prev.lists[scope], prev.balanced.distinct[scope]
			return
		}
		p.lists[scope] = pl.tableOf(h, scope)
	}
	if pl.affinity != nil {
		p.balanced.distinct[scope] = pl.arrange(prev.affinityList(scope), from.Slice(), nil, scope)
	}
}

// numbersAs reports whether endpoints have the same numbers in affinity records as before.
func (pl placer) numbersAs(prev *placed) bool {
	if pl.affinity == nil {
		return prev.affinity == 0
	}
	return prev.affinity == pl.affinity.key()
}

// tableOf fills the slots of a consistent hash.
func (pl placer) tableOf(h *hashed, scope int) slotList {
	targets := make([]target, len(h.endpoints))
	for i, addr := range h.endpoints {
		targets[i] = pl.target(addr, scope)
	}
	table := maglev.Table(h.endpoints, h.weights, h.most)
	list := make([]target, len(table))
	for slot, endpoint := range table {
		list[slot] = targets[endpoint]
	}
	return slotsOf(list)
}

// placeOnce gives each endpoint one slot. If they are many and few have changed since prev, it costs
// what they change, and a look at each slot.
func (pl placer) placeOnce(p, prev *placed, from desired.Endpoints, scope int) {
	if from.Len() > partSlots {
		p.from[scope] = from
		if prev != nil && prev.from[scope].Len() > 0 && pl.numbersAs(prev) {
			if added, removed := from.Changes(prev.from[scope]); len(removed) <= fewRemoved {
				p.lists[scope] = pl.rearrange(prev.lists[scope], added, removed, scope)
				return
			}
		}
	}
	p.lists[scope] = pl.arrange(prev.list(scope), from.Slice(), nil, scope)
}

// fewRemoved is how many removed endpoints are searched for in the slots.
const fewRemoved = 8

// rearrange is arrange for slots of which each has an endpoint, after some of them were added and
// removed.
func (pl placer) rearrange(prev slotList, added, removed []netip.AddrPort, scope int) slotList {
	size := prev.len() + len(added) - len(removed)
	var holes []int
	for slot, t := range prev.all() {
		switch {
		case slices.Contains(removed, t.addr):
			if slot < size {
				holes = append(holes, slot)
			}
		case slot >= size:
			added = append(added, t.addr)
		}
	}
	for slot := prev.len(); slot < size; slot++ {
		holes = append(holes, slot)
	}
	slices.SortFunc(added, netip.AddrPort.Compare)
	targets := make([]target, len(added))
	for i, addr := range added {
		targets[i] = pl.target(addr, scope)
	}
	return prev.with(size, holes, targets)
}

// arrange fills slots with the sorted endpoints, with so many for each, nil for one. Slots of
// prev keep their endpoint if it still has one to get; the others are filled in order.
func (pl placer) arrange(prev slotList, endpoints []netip.AddrPort, counts []uint16, scope int) slotList {
	size := len(endpoints)
	if counts != nil {
		size = 0
		for _, n := range counts {
			size += int(n)
		}
	}
	list, left := make([]target, size), make([]uint16, len(endpoints))
	for j := range left {
		left[j] = 1
		if counts != nil {
			left[j] = counts[j]
		}
	}
	for i, t := range prev.all() {
		if i == len(list) {
			break
		}
		if j, ok := slices.BinarySearchFunc(endpoints, t.addr, netip.AddrPort.Compare); ok && left[j] > 0 {
			list[i] = pl.target(endpoints[j], scope)
			left[j]--
		}
	}
	hole := 0
	for j, addr := range endpoints {
		for ; left[j] > 0; left[j]-- {
			for list[hole].addr.IsValid() {
				hole++
			}
			list[hole] = pl.target(addr, scope)
		}
	}
	return slotsOf(list)
}

// Weights are exact up to so many slots. Above, there is one number of slots, but for many
// endpoints, as each number of slots has chains of its own.
const exactSlots, roundedSlots, slotsPerEndpoint = 128, 1024, 8

// shares returns the number of slots of each endpoint, at least one, in proportion to the
// weights, and at most so many in all, if the endpoints are not more and most is not 0. With a rounded number
// of slots, the greatest remainders get what is left.
func shares(weights []uint16, most int) []uint16 {
	divisor, total := 0, 0
	for _, w := range weights {
		total += int(w)
		divisor = gcd(divisor, int(w))
	}
	counts := make([]uint16, len(weights))
	if most == 0 {
		most = maxEndpoints
	}
	if total/divisor <= min(exactSlots, most) {
		for i, w := range weights {
			counts[i] = w / uint16(divisor)
		}
		return counts
	}
	size := min(roundedSlots, most)
	for size < max(len(weights), min(slotsPerEndpoint*len(weights), most)) && size < maxEndpoints {
		size *= 2
	}
	order := make([]int, len(weights))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(weights[a], weights[b]) })
	for len(order) > 0 && int(weights[order[0]])*size < total { // whose share is less than a slot
		counts[order[0]] = 1
		total, size, order = total-int(weights[order[0]]), size-1, order[1:]
	}
	left := size
	for _, i := range order {
		counts[i] = uint16(int(weights[i]) * size / total)
		left -= int(counts[i])
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(int(weights[b])*size%total, int(weights[a])*size%total) })
	for _, i := range order[:left] {
		counts[i]++
	}
	return counts
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
