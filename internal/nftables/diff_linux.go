package nftables

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// elementSink receives the elements of service ports.
type elementSink interface {
	put(in setID, key, keyEnd, data elementBytes)
	remove(in setID, key, keyEnd elementBytes)
}

// mapped is an element that maps the key of a frontend to a number.
type mapped struct {
	in    setID
	value uint32
}

// values lists the elements of the frontend in maps to numbers.
func (f *placedFrontend) values() [6]mapped {
	return [6]mapped{
		{forKind(f.key, setServices, setNodePorts), f.entry},
		{setFirewalled, f.firewalled},
		{setLimits, f.limit},
		{forKind(f.key, setLocals, setNodePortLocals), f.outside},
		{forKind(f.key, setShortCircuits, setNodePortShortCircuits), f.inside},
		{forKind(f.key, setAffinityKeys, setNodePortAffinityKeys), f.affinityID},
	}
}

// indexed is the slots of a scope under the key of a frontend.
type indexed struct {
	in   setID
	from uint32 // the index of the first
	list slotList
}

// indexedLists returns the lists of a frontend of p.
func (p *placed) indexedLists(f *placedFrontend) [2]indexed {
	var lists [2]indexed
	for i := range lists {
		lists[i] = indexed{in: forKind(f.key, setEndpoints, setNodePortEndpoints), from: offset(indexScope(i))}
		if p.affinity != 0 {
			lists[i].in = forKind(f.key, setAffinityPicks, setNodePortAffinityPicks)
			lists[i].from |= ownBit
		}
		if f.uses[i] {
			lists[i].list = p.lists[i]
		}
	}
	return lists
}

func (x *indexed) key(k desired.Key, i int) elementBytes {
	return frontendKey(k).mark(x.from + uint32(i))
}

// data is the endpoint itself, or its number in affinity records.
func (t target) data() elementBytes {
	if t.id != 0 {
		return markData(t.id)
	}
	return addrPortData(t.addr)
}

// rangeKeys are the first and the last key that a source range covers.
func rangeKeys(k desired.Key, p netip.Prefix) (first, last elementBytes) {
	return frontendKey(k).addr(p.Addr()), frontendKey(k).addr(lastAddr(p))
}

// lastAddr is the highest address of a masked prefix.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(b); bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// diff writes the difference between two placements of one service port; either
// may be nil.
func diff(sink elementSink, prev, next *placed) {
	if prev != nil && next != nil && prev.affinity != next.affinity {
		diff(sink, prev, nil)
		prev = nil
	}
	a, b := prev.all(), next.all()
	for len(a) > 0 || len(b) > 0 {
		switch {
		case len(b) == 0 || len(a) > 0 && a[0].key.Compare(b[0].key) < 0:
			diffFrontend(sink, prev, nil, &a[0], &placedFrontend{key: a[0].key})
			a = a[1:]
		case len(a) == 0 || a[0].key.Compare(b[0].key) > 0:
			diffFrontend(sink, nil, next, &placedFrontend{key: b[0].key}, &b[0])
			b = b[1:]
		default:
			diffFrontend(sink, prev, next, &a[0], &b[0])
			a, b = a[1:], b[1:]
		}
	}
	for i := range 2 {
		diffAffinityEndpoints(sink, prev.affinityList(i), next.affinityList(i))
		was, is := prev.affinityDraw(i), next.affinityDraw(i)
		if p := cmp.Or(next, prev); was != is {
			diffValue(sink, markData(p.affinity|scopeBit(i)), was, is)
		}
	}
}

func (p *placed) all() []placedFrontend {
	if p == nil {
		return nil
	}
	return p.frontends
}

// affinityDraw is the element with the number of endpoints of a scope.
func (p *placed) affinityDraw(i int) mapped {
	if p == nil {
		return mapped{in: setAffinityCounts}
	}
	return mapped{in: setAffinityCounts, value: uint32(p.draws[i])}
}

func (p *placed) affinityList(i int) slotList {
	switch {
	case p == nil || p.affinity == 0:
		return nil
	case p.balanced != nil && p.balanced.distinct[i] != nil:
		return p.balanced.distinct[i]
	default:
		return p.lists[i]
	}
}

// diffFrontend writes the difference of one frontend. A frontend without values does not
// exist.
func diffFrontend(sink elementSink, prev, next *placed, old, now *placedFrontend) {
	key := frontendKey(now.key)
	was, is := old.values(), now.values()
	for i := range is {
		diffValue(sink, key, was[i], is[i])
	}
	diffRanges(sink, now.key, old.ranges, now.ranges)
	wasLists, isLists := prev.listsOf(old), next.listsOf(now)
	for i := range isLists {
		diffList(sink, now.key, &wasLists[i], &isLists[i])
	}
}

func (p *placed) listsOf(f *placedFrontend) [2]indexed {
	if p == nil {
		return [2]indexed{}
	}
	return p.indexedLists(f)
}

func diffValue(sink elementSink, key elementBytes, was, is mapped) {
	if was.value == is.value {
		return
	}
	if was.value != 0 {
		sink.remove(was.in, key, elementBytes{})
	}
	if is.value != 0 {
		sink.put(is.in, key, elementBytes{}, markData(is.value))
	}
}

func diffRanges(sink elementSink, k desired.Key, was, is []netip.Prefix) {
	has := func(sorted []netip.Prefix, p netip.Prefix) bool {
		byAddr := func(o, p netip.Prefix) int { return o.Addr().Compare(p.Addr()) } // which no two share
		i, found := slices.BinarySearchFunc(sorted, p, byAddr)
		return found && sorted[i] == p
	}
	for _, p := range was {
		if !has(is, p) {
			first, last := rangeKeys(k, p)
			sink.remove(setSourceRanges, first, last)
		}
	}
	for _, p := range is {
		if !has(was, p) {
			first, last := rangeKeys(k, p)
			sink.put(setSourceRanges, first, last, elementBytes{})
		}
	}
}

func diffList(sink elementSink, k desired.Key, was, is *indexed) {
	diffSlots(was.list, is.list, func(i int, old, now *target) {
		if old != nil {
			sink.remove(was.in, was.key(k, i), elementBytes{})
		}
		if now != nil {
			sink.put(is.in, is.key(k, i), elementBytes{}, now.data())
		}
	})
}

func diffAffinityEndpoints(sink elementSink, was, is slotList) {
	diffSlots(was, is, func(_ int, old, now *target) {
		if old != nil {
			sink.remove(setAffinityEndpoints, markData(old.id), elementBytes{})
		}
		if now != nil {
			sink.put(setAffinityEndpoints, markData(now.id), elementBytes{}, addrPortData(now.addr))
		}
	})
}

// reconciler is an elementSink that writes only elements that the kernel does not have. It
// removes those that it has from its lists, so that the extra elements remain there.
type reconciler struct {
	t    *transaction
	have *[numSets]map[string]string // nil when the table is new
	// ranges holds the keys of source ranges by VIP, once it is needed.
	ranges map[string][]string
}

func (r *reconciler) put(in setID, key, keyEnd, data elementBytes) {
	if r.have != nil && len(r.have[in]) > 0 {
		k := string(key.bytes()) + string(keyEnd.bytes())
		old, ok := r.have[in][k]
		switch {
		case ok:
			delete(r.have[in], k)
			if old == string(data.bytes()) {
				return
			}
			r.t.remove(in, key, keyEnd)
		case in == setSourceRanges:
			r.removeOverlapping(k)
		}
	}
	r.t.put(in, key, keyEnd, data)
}

func (r *reconciler) remove(setID, elementBytes, elementBytes) {}

// removeOverlapping removes the source ranges of a VIP that overlap a new one. They are extra,
// but the kernel rejects a range that overlaps another (nft_pipapo_insert), so they cannot
// stay until the end. A key is both ends of the range: VIP, protocol, port, address.
func (r *reconciler) removeOverlapping(k string) {
	have, end := r.have[setSourceRanges], len(k)/2
	addr := (end - 8) / 2 // the length of an address, protocol and port having 4 bytes each
	vip := func(k string) string { return k[:end-addr] }
	if r.ranges == nil {
		r.ranges = map[string][]string{}
		for o := range have {
			r.ranges[vip(o)] = append(r.ranges[vip(o)], o)
		}
	}
	for _, o := range r.ranges[vip(k)] {
		if _, extra := have[o]; extra && o[:end] <= k[end:] && k[:end] <= o[end:] {
			delete(have, o)
			r.t.remove(setSourceRanges, elementOf(o[:end]), elementOf(o[end:]))
		}
	}
}
