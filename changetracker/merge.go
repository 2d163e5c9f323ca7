package changetracker

import (
	"net/netip"
	"slices"
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

// mergeAll returns the union of all contributions, sorted, with the winning record of each
// address. If there is only one slice its list is shared, if possible, and not copied.
func mergeAll(contributions []contribution) []Endpoint {
	if len(contributions) == 0 {
		return nil
	}
	if len(contributions) == 1 && contributions[0].complete() {
		return contributions[0].endpoints
	}
	best := bestRecords(contributions)
	merged := make([]Endpoint, len(best))
	for i, r := range best {
		merged[i] = r.value()
	}
	return merged
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
func mergeTouched(old []Endpoint, contributions []contribution, addrs []netip.AddrPort) []Endpoint {
	if len(contributions) <= 1 {
		return mergeAll(contributions)
	}
	merged := make([]Endpoint, 0, len(old)+len(addrs))
	for _, addr := range addrs {
		i, found := searchEndpoint(old, addr)
		merged = append(merged, old[:i]...)
		if old = old[i:]; found {
			old = old[1:]
		}
		if r := winner(contributions, addr); r.endpoint != nil {
			merged = append(merged, r.value())
		}
	}
	return append(merged, old...)
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

// winner returns the record of addr that counts among all contributions.
func winner(contributions []contribution, addr netip.AddrPort) record {
	var best record
	for _, c := range contributions {
		best = best.better(record{slice: c.slice, addr: addr, endpoint: c.find(addr)})
	}
	return best
}
