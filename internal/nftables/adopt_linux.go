package nftables

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// takeover finds in the kernel which indexes the endpoints of service ports have, and which numbers in affinity
// records. Single wrong or missing elements do not change them.
type takeover struct {
	*Engine

	have *observation
	// repairs means that an endpoint with a wrong number gets one that is left over, so that only such
	// endpoints are differences. Otherwise nothing gets a number that a record may still have.
	repairs bool
}

// hints returns placements with the indexes, to start from.
func (t *takeover) hints(update *desired.Update) map[changetracker.ServicePortName]*placed {
	numbers, taken := t.have.numberedEndpoints(), map[uint32]bool{}
	hints := make(map[changetracker.ServicePortName]*placed, len(update.Changes))
	for s := range update.Services() {
		var affinity *affinityService
		if s.Affinity > 0 && t.holds == nil {
			affinity = t.adoptAffinity(s, numbers, taken)
		}
		p := &placed{}
		for scope := range p.lists {
			p.lists[scope] = slotsOf(t.bestList(s, scope, affinity))
		}
		hints[s.Name] = p
	}
	return hints
}

// adoptAffinity takes over the number that most elements of a service port have, and the
// numbers of its endpoints. Endpoints whose element is wrong get the numbers that are left.
func (t *takeover) adoptAffinity(s *desired.Service, numbers map[uint32][]numbered, taken map[uint32]bool) *affinityService {
	votes, picked := map[uint32]int{}, map[uint32]bool{}
	for i := range s.Frontends {
		key := s.Key(&s.Frontends[i])
		votes[t.have.affinityKey(key)]++
		for scope := range 2 {
			for _, id := range t.picks(s, key, scope) {
				votes[id&affinityIDMask]++
				picked[id] = true
			}
		}
	}
	best := mostVotes(votes, taken)
	if best == 0 || t.state.affinity.services[s.Name] != nil {
		return nil
	}
	taken[best] = true
	affinity := t.state.affinity.adopt(s.Name, best>>affinitySlotLen)
	if t.repairs {
		adoptNumbers(affinity, s, numbers[best], picked)
		return affinity
	}
	for _, n := range numbers[best] {
		if _, has := affinity.slots[n.addr]; !has && !affinity.used[n.number] {
			affinity.adopt(n.addr, n.number)
		}
	}
	return affinity
}

// mostVotes returns the id with most votes that is not taken; 0 if there is none.
func mostVotes(votes map[uint32]int, taken map[uint32]bool) (best uint32) {
	for id, n := range votes {
		if id != 0 && !taken[id] && (n > votes[best] || best == 0 || n == votes[best] && id < best) {
			best = id
		}
	}
	return best
}

func adoptNumbers(affinity *affinityService, s *desired.Service, numbers []numbered, picked map[uint32]bool) {
	due := map[netip.AddrPort]bool{}
	for _, addr := range slices.Concat(s.Cluster.Slice(), s.Local.Slice()) {
		due[addr] = true
	}
	left := map[uint32]bool{}
	for id := range picked {
		if id&affinityIDMask == affinity.key() {
			left[id&affinitySlotMask] = true
		}
	}
	for _, n := range numbers {
		left[n.number] = true
	}
	for _, n := range numbers {
		if due[n.addr] && !affinity.used[n.number] {
			affinity.adopt(n.addr, n.number)
			delete(due, n.addr)
		}
	}
	for number := range affinity.used {
		delete(left, number)
	}
	addrs, free := sortedKeys(due, netip.AddrPort.Compare), sortedKeys(left, func(a, b uint32) int { return int(a) - int(b) })
	for i := range min(len(addrs), len(free)) {
		affinity.adopt(addrs[i], free[i])
	}
}

func sortedKeys[K comparable](m map[K]bool, compare func(a, b K) int) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, compare)
	return keys
}

// slots is how many slots a scope has; 0 if they need no hint.
func (t *takeover) slots(s *desired.Service, scope int) (n int, counts []uint16) {
	endpoints, weights := s.Endpoints(indexScope(scope)), s.Weights(indexScope(scope))
	if t.holds != nil || choiceOf(s, t.Traits(s)) != atRandom {
		return 0, nil
	}
	if endpoints.Len() < 2 || weights == nil {
		return endpoints.Len(), nil
	}
	counts = shares(weights, s.MaxSlots())
	for _, c := range counts {
		n += int(c)
	}
	return n, counts
}

// picks are the numbers in the slots of a frontend with session affinity.
func (t *takeover) picks(s *desired.Service, key desired.Key, scope int) (ids []uint32) {
	x := indexed{in: forKind(key, setAffinityPicks, setNodePortAffinityPicks), from: offset(indexScope(scope)) | ownBit}
	n, _ := t.slots(s, scope)
	for i := range n {
		if data := t.have.element[x.in][keyString(x.key(key, i))]; len(data) == 4 {
			ids = append(ids, binary.NativeEndian.Uint32([]byte(data)))
		}
	}
	return ids
}

// bestList returns the slots of the frontend that has most of what a scope needs. A slot
// without a valid element is empty.
func (t *takeover) bestList(s *desired.Service, scope int, affinity *affinityService) (best []target) {
	n, counts := t.slots(s, scope)
	most, holders := 0, affinity.holders()
	for i := range s.Frontends {
		list := t.listOf(s.Key(&s.Frontends[i]), scope, n, holders)
		if len(s.Frontends) == 1 {
			return list
		}
		if got := retained(list, s.Endpoints(indexScope(scope)).Slice(), counts); got > most {
			best, most = list, got
		}
		if most == n {
			break
		}
	}
	return best
}

// retained is how many slots hold an endpoint that is due there.
func retained(list []target, endpoints []netip.AddrPort, counts []uint16) (n int) {
	used := make([]uint16, len(endpoints))
	for _, held := range list {
		j, ok := slices.BinarySearchFunc(endpoints, held.addr, netip.AddrPort.Compare)
		if ok && (counts == nil && used[j] == 0 || counts != nil && used[j] < counts[j]) {
			used[j]++
			n++
		}
	}
	return n
}

// listOf reads slots under the key of a frontend. With session affinity, they have numbers of holders.
func (t *takeover) listOf(key desired.Key, scope, n int, holders map[uint32]netip.AddrPort) []target {
	x := indexed{in: forKind(key, setEndpoints, setNodePortEndpoints), from: offset(indexScope(scope))}
	if holders != nil {
		x.in, x.from = forKind(key, setAffinityPicks, setNodePortAffinityPicks), x.from|ownBit
	}
	list := make([]target, n)
	for i := range list {
		data := t.have.element[x.in][keyString(x.key(key, i))]
		switch {
		case holders == nil:
			list[i].addr, _ = parseAddrPort(data)
		case len(data) == 4:
			list[i].addr = holders[numberIn(data)&affinityMask]
		}
	}
	return list
}

// holders are the endpoints of a service port by their numbers; nil without session affinity.
func (s *affinityService) holders() map[uint32]netip.AddrPort {
	if s == nil {
		return nil
	}
	holders := make(map[uint32]netip.AddrPort, len(s.slots))
	for addr, slot := range s.slots {
		holders[s.key()|slot] = addr
	}
	return holders
}

// affinityKey is the number of the service port, as in affinityService.key, to which a frontend
// leads; 0 is none.
func (o *observation) affinityKey(frontend desired.Key) uint32 {
	return numberIn(o.element[forKind(frontend, setAffinityKeys, setNodePortAffinityKeys)][keyString(frontendKey(frontend))]) & affinityIDMask
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
		slices.SortFunc(list, func(a, b numbered) int { return cmp.Or(cmp.Compare(a.number, b.number), a.addr.Compare(b.addr)) })
	}
	return byKey
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
