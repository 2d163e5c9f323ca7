package desired

import (
	"fmt"
	"iter"
	"math"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/internal/sorted"
)

// Endpoints are addresses of endpoints, sorted, without duplicates. The zero value is none. They are
// immutable, so several goroutines may use them. Long lists share memory where they are equal, so
// that a change of a service port with thousands of endpoints costs what has changed.
type Endpoints struct{ list sorted.List[netip.AddrPort] }

// EndpointsOf returns a list of these addresses, which may be in any order.
func EndpointsOf(addrs ...netip.AddrPort) Endpoints {
	addrs = slices.Clone(addrs)
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	return endpointsOf(slices.Compact(addrs))
}

// endpointsOf takes over a sorted list without duplicates.
func endpointsOf(addrs []netip.AddrPort) Endpoints { return Endpoints{sorted.Of(addrs)} }

// Len returns how many there are.
func (e Endpoints) Len() int { return e.list.Len() }

// All yields the addresses in order.
func (e Endpoints) All() iter.Seq[netip.AddrPort] {
	return func(yield func(netip.AddrPort) bool) {
		for addr := range e.list.All {
			if !yield(*addr) {
				return
			}
		}
	}
}

// Slice returns the addresses in order; nil for none. They must not be changed. The first call for
// more than 128 copies them, so prefer All, Has and Changes.
func (e Endpoints) Slice() []netip.AddrPort { return e.list.Slice() }

// Has reports whether an address is in the list. It costs O(log N).
func (e Endpoints) Has(addr netip.AddrPort) bool {
	found := e.list.Find(func(o *netip.AddrPort) bool { return o.Compare(addr) < 0 })
	return found != nil && *found == addr
}

// At yields the endpoints with an address, in order of their ports.
func (e Endpoints) At(addr netip.Addr) iter.Seq[netip.AddrPort] {
	return func(yield func(netip.AddrPort) bool) {
		for from := 0; from <= math.MaxUint16; {
			begin := netip.AddrPortFrom(addr, uint16(from))
			found := e.list.Find(func(o *netip.AddrPort) bool { return o.Compare(begin) < 0 })
			if found == nil || found.Addr() != addr || !yield(*found) {
				return
			}
			from = int(found.Port()) + 1
		}
	}
}

// With returns the list with more addresses, in any order.
func (e Endpoints) With(addrs ...netip.AddrPort) Endpoints { return e.edited(addrs, false) }

// Without returns the list without some addresses, in any order.
func (e Endpoints) Without(addrs ...netip.AddrPort) Endpoints { return e.edited(addrs, true) }

func (e Endpoints) edited(addrs []netip.AddrPort, remove bool) Endpoints {
	edits := make([]sorted.Edit[netip.AddrPort], 0, len(addrs))
	for addr := range EndpointsOf(addrs...).All() {
		edits = append(edits, sorted.Edit[netip.AddrPort]{Item: addr, Remove: remove})
	}
	return Endpoints{e.list.With(edits, compareAddrs)}
}

// Equal reports whether two lists have the same addresses.
func (e Endpoints) Equal(o Endpoints) bool {
	if e.Len() != o.Len() {
		return false
	}
	added, _ := e.Changes(o)
	return len(added) == 0
}

// Changes returns the addresses that are only in e, and those that are only in since, sorted. For two
// lists of which one was made from the other, it costs about what has changed.
func (e Endpoints) Changes(since Endpoints) (added, removed []netip.AddrPort) {
	if e.list.Same(&since.list) {
		return nil, nil
	}
	sorted.Walk(&since.list, &e.list, compareAddrs, func(before, after *netip.AddrPort) {
		switch {
		case before == nil:
			added = append(added, *after)
		case after == nil:
			removed = append(removed, *before)
		}
	})
	return added, removed
}

// String is the addresses in brackets.
func (e Endpoints) String() string { return fmt.Sprint(e.Slice()) }

func compareAddrs(a, b *netip.AddrPort) int { return a.Compare(*b) }
