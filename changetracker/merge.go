package changetracker

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/internal/sorted"
)

// walk visits the items of two sorted lists in order, with nil for the list that does not have
// the item. Neither list has two equal items.
func walk[T any](a, b []T, compare func(x, y *T) int, visit func(x, y *T)) {
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		c := -1
		switch {
		case i == len(a):
			c = 1
		case j < len(b):
			c = compare(&a[i], &b[j])
		}
		switch {
		case c < 0:
			visit(&a[i], nil)
			i++
		case c > 0:
			visit(nil, &b[j])
			j++
		default:
			visit(&a[i], &b[j])
			i++
			j++
		}
	}
}

// anyOf returns x, or y if x is nil.
func anyOf[T any](x, y *T) *T {
	if x != nil {
		return x
	}
	return y
}

// mergeAll returns the union of what all slices have for a port, with the winning record of each
// address. If there is only one slice its list is shared, if possible, and not copied. Beyond the
// limit of a slice's endpoints, the lowest are enough for those of the union. It says whether the union
// has more.
func (s *heldService) mergeAll(key portKey, limit int) (merged endpointList, more bool) {
	var buffer [16]contribution
	contributions := slices.AppendSeq(buffer[:0], s.contributions(key))
	for i := range contributions {
		c := &contributions[i]
		more = more || len(c.endpoints) > limit
		c.endpoints = c.endpoints[:min(len(c.endpoints), limit)]
	}
	if len(contributions) == 0 {
		return endpointList{}, false
	}
	if len(contributions) == 1 && contributions[0].complete() {
		return sorted.Of(contributions[0].endpoints), more
	}
	best := bestRecords(contributions)
	if len(best) > limit {
		best, more = best[:limit], true
	}
	list := make([]Endpoint, len(best))
	for i, r := range best {
		list[i] = r.value()
	}
	return sorted.Of(list), more
}

func bestRecords(contributions []contribution) []record {
	total := 0
	for _, c := range contributions {
		total += len(c.endpoints)
	}
	records := make([]record, 0, total)
	for _, c := range contributions {
		for i := range c.endpoints {
			e := &c.endpoints[i]
			records = append(records, record{slice: c.slice, addr: c.addr(e), endpoint: e})
		}
	}
	if len(contributions) == 1 {
		return records
	}
	slices.SortStableFunc(records, func(a, b record) int { return a.addr.Compare(b.addr) })
	best := records[:0]
	for _, r := range records {
		if last := len(best) - 1; last >= 0 && best[last].addr == r.addr {
			best[last] = best[last].better(r)
			continue
		}
		best = append(best, r)
	}
	return best
}

// mergeTouched is mergeAll if only the records of some addresses, sorted and without
// duplicates, have changed since old was merged.
func (s *heldService) mergeTouched(key portKey, old endpointList, addrs []netip.AddrPort) endpointList {
	edits := make([]sorted.Edit[Endpoint], len(addrs))
	for i, addr := range addrs {
		if r := s.winner(key, addr, nil); r.endpoint != nil {
			edits[i].Item = r.value()
		} else {
			edits[i] = sorted.Edit[Endpoint]{Item: Endpoint{Addr: addr}, Remove: true}
		}
	}
	return old.With(edits, byAddr)
}

// record is what one slice says about an address.
type record struct {
	slice *heldSlice
	addr  netip.AddrPort
	// endpoint is nil if the slice does not have the address. Its Addr may lack the port.
	endpoint *Endpoint
}

// value returns the endpoint with its complete address.
func (r record) value() Endpoint {
	e := *r.endpoint
	e.Addr = r.addr
	return e
}

// better returns the record that counts of two for the same address (W-04).
func (r record) better(o record) record {
	switch {
	case r.endpoint == nil:
		return o
	case o.endpoint == nil:
		return r
	}
	mine, theirs := r.endpoint.rank(), o.endpoint.rank()
	if theirs > mine || theirs == mine && o.slice.succeeds(r.slice) {
		return o
	}
	return r
}

// winner returns the record of addr that counts among all slices but one, which may be nil.
func (s *heldService) winner(key portKey, addr netip.AddrPort, but *heldSlice) record {
	var best record
	for c := range s.contributions(key) {
		if c.slice != but {
			best = best.better(record{slice: c.slice, addr: addr, endpoint: c.find(addr)})
		}
	}
	return best
}
