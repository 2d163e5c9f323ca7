package nftables

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// addrRange is a range of addresses, including both ends.
type addrRange struct{ first, last netip.Addr }

// ranges turns sorted prefixes, none of which contains another, into ranges that are not
// adjacent: the kernel rejects an interval that begins where another ends.
func ranges(prefixes []netip.Prefix) []addrRange {
	var rs []addrRange
	for _, p := range prefixes {
		r := addrRange{first: p.Addr(), last: lastAddr(p)}
		if n := len(rs); n > 0 && rs[n-1].last.Next() == r.first {
			rs[n-1].last = r.last
			continue
		}
		rs = append(rs, r)
	}
	return rs
}

// intervalSets are the sets with the globals.
func intervalSets() []setID { return []setID{setServiceCIDRs, setNodePortAddresses, setPodCIDRs} }

// prefixesOf returns the wanted content of an interval set.
func prefixesOf(g *desired.Globals, id setID) []netip.Prefix {
	switch id {
	case setServiceCIDRs:
		return g.ServiceCIDRs
	case setNodePortAddresses:
		return g.NodePortAddresses
	default:
		return g.PodCIDRs
	}
}

// changeIntervals writes the difference between two contents of an interval set: a packet may miss what
// is written again. It writes the whole set if nothing is known of the kernel's.
func (w *wire) changeIntervals(spec *setSpec, was, is []netip.Prefix) {
	var old []addrRange
	if slices.Equal(was, unknownPrefixes) {
		w.Flush(spec.name)
	} else {
		old = ranges(was)
	}
	now := ranges(is)
	w.intervals(nft.DeleteElements(), spec, slices.DeleteFunc(slices.Clone(old), func(r addrRange) bool { return slices.Contains(now, r) }))
	w.intervals(nft.AddElements(), spec, slices.DeleteFunc(now, func(r addrRange) bool { return slices.Contains(old, r) }))
}

// intervals adds or deletes ranges.
func (w *wire) intervals(op nft.ElementOp, spec *setSpec, rs []addrRange) {
	if len(rs) == 0 {
		return
	}
	w.ElementList(op, spec.name, func() {
		for _, r := range rs {
			w.Buf = nft.AppendIntervalEdge(w.Buf, r.first, false)
			if end := r.last.Next(); end.IsValid() {
				w.Buf = nft.AppendIntervalEdge(w.Buf, end, true)
			}
		}
	})
}

// rangesOf returns the ranges in the elements of an interval set.
func rangesOf(elements []nft.Element) []addrRange {
	slices.SortFunc(elements, func(a, b nft.Element) int {
		return slices.Compare(a.Key, b.Key)
	})
	var rs []addrRange
	for _, e := range elements {
		addr, ok := netip.AddrFromSlice(e.Key)
		switch {
		case !ok:
		case !e.End:
			all := netip.PrefixFrom(addr, 0).Masked()
			rs = append(rs, addrRange{first: addr, last: lastAddr(all)})
		case len(rs) > 0:
			rs[len(rs)-1].last = addr.Prev()
		}
	}
	return rs
}

// unknownPrefixes stand for the content of an interval set that is not as it should be.
var unknownPrefixes = []netip.Prefix{{}} // read-only

// refCounts counts the service ports that need an address or a port in a shared set.
type refCounts[K comparable] struct {
	in     setID
	key    func(K) elementBytes
	counts map[K]int
	before map[K]bool // of those counted since the last flush: whether they were in the set
}

func newRefCounts[K comparable](in setID, key func(K) elementBytes) *refCounts[K] {
	return &refCounts[K]{in: in, key: key, counts: map[K]int{}, before: map[K]bool{}}
}

func clusterIPKey(a netip.Addr) elementBytes { return elementBytes{}.addr(a) }

func hairpinKey(a netip.Addr) elementBytes { return elementBytes{}.addr(a).addr(a) }

// healthPortKey is for TCP, as health checks are.
func healthPortKey(port uint16) elementBytes { return elementBytes{}.proto(desired.TCP).port(port) }

func (r *refCounts[K]) add(a K, n int) {
	if _, ok := r.before[a]; !ok {
		r.before[a] = r.counts[a] > 0
	}
	if r.counts[a] += n; r.counts[a] == 0 {
		delete(r.counts, a)
	}
}

// frontendSets collects changes of the sets of frontends. They depend on nothing but whether a frontend
// exists: one that moves to another service port stays in its set.
type frontendSets map[desired.Key]int

func (f frontendSets) add(k desired.Key, n int) {
	if f[k] += n; f[k] == 0 {
		delete(f, k)
	}
}

// flush writes the new frontends, and deletes those that are gone.
func (f frontendSets) flush(sink elementSink) {
	for k, n := range f {
		if in := forKind(k, setFrontends, setNodePortFrontends); n > 0 {
			sink.put(in, frontendKey(k), elementBytes{}, elementBytes{})
		} else {
			sink.remove(in, frontendKey(k), elementBytes{})
		}
	}
	clear(f)
}

// flush writes the changes since the last flush.
func (r *refCounts[K]) flush(sink elementSink) {
	for a, was := range r.before {
		is := r.counts[a] > 0
		if is && !was {
			sink.put(r.in, r.key(a), elementBytes{}, elementBytes{})
		}
		if was && !is {
			sink.remove(r.in, r.key(a), elementBytes{})
		}
	}
	clear(r.before)
}
