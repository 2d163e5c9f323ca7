package changetracker

import (
	"net/netip"
	"slices"
)

// walk visits the addresses of two sorted lists in order, each once, with nil for
// the list that does not have it.
func walk(a, b []Endpoint, visit func(x, y *Endpoint)) {
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		c := -1
		switch {
		case i == len(a):
			c = 1
		case j < len(b):
			c = a[i].Addr.Compare(b[j].Addr)
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

// mergeAll is the union of all contributions, sorted, with the winner of each
// address. The list of a lone slice is shared, not copied.
func mergeAll(contributions []contribution) []Endpoint {
	switch len(contributions) {
	case 0:
		return nil
	case 1:
		return contributions[0].endpoints
	}
	total := 0
	for _, c := range contributions {
		total += len(c.endpoints)
	}
	records := make([]record, 0, total)
	for _, c := range contributions {
		for i := range c.endpoints {
			records = append(records, record{slice: c.slice, endpoint: &c.endpoints[i]})
		}
	}
	slices.SortStableFunc(records, func(a, b record) int { return a.endpoint.Addr.Compare(b.endpoint.Addr) })
	best := records[:0]
	for _, r := range records {
		if last := len(best) - 1; last >= 0 && best[last].endpoint.Addr == r.endpoint.Addr {
			best[last] = best[last].better(r)
			continue
		}
		best = append(best, r)
	}
	merged := make([]Endpoint, len(best))
	for i, r := range best {
		merged[i] = *r.endpoint
	}
	return merged
}

// mergeTouched is mergeAll when only the records of some addresses, sorted and
// without duplicates, differ from what old was merged from.
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
			merged = append(merged, *r.endpoint)
		}
	}
	return append(merged, old...)
}

// localReady are the distinct addresses of the endpoints that health checks count
// (EPS-40), sorted.
func localReady(list []Endpoint) []netip.Addr {
	var addrs []netip.Addr
	for i := range list {
		if e := &list[i]; e.Local && e.Ready {
			addrs = append(addrs, e.Addr.Addr())
		}
	}
	return slices.Compact(addrs) // sorted, as the list is sorted by address first
}
