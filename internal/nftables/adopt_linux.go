package nftables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// adoptAll finds the indexes of the service ports' endpoints in the kernel, and their
// numbers in affinity records.
func (e *Engine) adoptAll(update *desired.Update, o *observation) map[changetracker.ServicePortName]*placed {
	hints := make(map[changetracker.ServicePortName]*placed, len(update.Changes))
	numbers, taken := o.numberedEndpoints(), map[uint32]bool{}
	for s := range update.Services() {
		p := &placed{}
		var affinity *affinityService
		for i := range s.Frontends {
			key := s.Key(&s.Frontends[i])
			if s.Affinity > 0 && affinity == nil {
				affinity = e.adoptAffinity(s, o.affinityKey(key), numbers, taken)
			}
			for scope := range p.lists {
				if p.lists[scope] == nil {
					p.lists[scope] = slotsOf(o.listOf(key, scope, affinity != nil, s.Endpoints(indexScope(scope)).Len()))
				}
			}
		}
		hints[s.Name] = p
	}
	return hints
}

// affinityKey is the number of the service port, as in affinityService.key, to which a frontend
// leads; 0 is none.
func (o *observation) affinityKey(frontend desired.Key) uint32 {
	return numberIn(o.element[forKind(frontend, setAffinityKeys, setNodePortAffinityKeys)][keyString(frontendKey(frontend))]) & affinityIDMask
}

// adoptAffinity takes over the number of a service port, unless another one has it, and those of its
// endpoints. Not all of them are in slots: some have too little weight, or are of a scope that no
// frontend has.
func (e *Engine) adoptAffinity(s *desired.Service, key uint32, numbers map[uint32][]numbered, taken map[uint32]bool) *affinityService {
	if key == 0 || taken[key] || e.state.affinity.services[s.Name] != nil {
		return nil
	}
	taken[key] = true
	affinity := e.state.affinity.adopt(s.Name, key>>affinitySlotLen)
	for _, n := range numbers[key] {
		if _, has := affinity.slots[n.addr]; !has && !affinity.used[n.number] {
			affinity.adopt(n.addr, n.number)
		}
	}
	return affinity
}

// numbered is an element of affinity-endpoints.
type numbered struct {
	number uint32
	addr   netip.AddrPort
}

// numberedEndpoints lists the endpoints that have numbers, by the key of the service port, in order of
// number.
func (o *observation) numberedEndpoints() map[uint32][]numbered {
	byKey := map[uint32][]numbered{}
	for key, data := range o.element[setAffinityEndpoints] {
		id := numberIn(key)
		if addr, ok := parseAddrPort(data); ok && id&affinitySlotMask <= maxAffinitySlot {
			byKey[id&affinityIDMask] = append(byKey[id&affinityIDMask], numbered{id & affinitySlotMask, addr})
		}
	}
	for _, list := range byKey {
		slices.SortFunc(list, func(a, b numbered) int { return int(a.number) - int(b.number) })
	}
	return byKey
}

// listOf reads the endpoints of one scope under the key of a frontend, in the order of
// their indexes, probably about as many as expected. With session affinity they have numbers.
func (o *observation) listOf(key desired.Key, scope int, affinity bool, expected int) []target {
	x := indexed{in: forKind(key, setEndpoints, setNodePortEndpoints), from: offset(indexScope(scope))}
	if affinity {
		x.in, x.from = forKind(key, setAffinityPicks, setNodePortAffinityPicks), x.from|ownBit
	}
	var list []target
	for i := range maxEndpoints {
		data, ok := o.element[x.in][keyString(x.key(key, i))]
		if !ok {
			break
		}
		t, ok := o.targetOf(data, affinity)
		if !ok {
			break
		}
		if list == nil {
			list = make([]target, 0, expected)
		}
		list = append(list, t)
	}
	return list
}

// targetOf returns the endpoint in a slot, from the data of its element.
func (o *observation) targetOf(data string, affinity bool) (t target, ok bool) {
	if affinity {
		t.id, data = numberIn(data), o.element[setAffinityEndpoints][data]
	}
	t.addr, ok = parseAddrPort(data)
	return t, ok
}

func keyString(k elementBytes) string { return string(k.bytes()) }

func parseAddrPort(data string) (ap netip.AddrPort, ok bool) {
	n := len(data) - 4
	if n < 0 {
		return ap, false
	}
	addr, ok := netip.AddrFromSlice([]byte(data[:n]))
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16([]byte(data[n:]))), ok
}

// globals returns want without the lists that the kernel does not hold, so that these count
// as changed.
func (o *observation) globals(want *desired.Globals) desired.Globals {
	g := *want
	for _, id := range intervalSets() {
		if slices.Equal(o.ranges[id], ranges(prefixesOf(want, id))) {
			continue
		}
		switch id {
		case setServiceCIDRs:
			g.ServiceCIDRs = unknownPrefixes
		case setNodePortAddresses:
			g.NodePortAddresses = unknownPrefixes
		default:
			g.PodCIDRs = unknownPrefixes
		}
	}
	return g
}
