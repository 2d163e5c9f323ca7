package nftables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// hints finds the indexes of endpoints in the kernel, and their numbers in affinity records.
// Single wrong or missing elements do not change them, so that only these are differences.
func (v *verification) hints() map[changetracker.ServicePortName]*placed {
	numbers, taken := v.have.numberedEndpoints(), map[uint32]bool{}
	hints := make(map[changetracker.ServicePortName]*placed, len(v.update.Changes))
	for s := range v.update.Services() {
		var affinity *affinityService
		if s.Affinity > 0 && v.scratch.holds == nil {
			affinity = v.adoptAffinity(s, numbers, taken)
		}
		p := &placed{}
		for scope := range p.lists {
			p.lists[scope] = slotsOf(v.bestList(s, scope, affinity))
		}
		hints[s.Name] = p
	}
	return hints
}

// adoptAffinity takes over the number that most elements of a service port have, and the
// numbers of its endpoints. Endpoints whose element is wrong get the numbers that are left.
func (v *verification) adoptAffinity(s *desired.Service, numbers map[uint32][]numbered, taken map[uint32]bool) *affinityService {
	votes, picked := map[uint32]int{}, map[uint32]bool{}
	for i := range s.Frontends {
		key := s.Key(&s.Frontends[i])
		votes[v.have.affinityKey(key)]++
		for scope := range 2 {
			for _, id := range v.picks(s, key, scope) {
				votes[id&affinityIDMask]++
				picked[id] = true
			}
		}
	}
	best := uint32(0)
	for id, n := range votes {
		if id != 0 && !taken[id] && (n > votes[best] || best == 0 || n == votes[best] && id < best) {
			best = id
		}
	}
	if best == 0 {
		return nil
	}
	taken[best] = true
	affinity := v.scratch.state.affinity.adopt(s.Name, best>>affinitySlotLen)
	adoptNumbers(affinity, s, numbers[best], picked)
	return affinity
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
func (v *verification) slots(s *desired.Service, scope int) (n int, counts []uint16) {
	endpoints, weights := s.Endpoints(indexScope(scope)), s.Weights(indexScope(scope))
	if v.scratch.holds != nil || choiceOf(s, v.scratch.Traits(s)) != atRandom {
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
func (v *verification) picks(s *desired.Service, key desired.Key, scope int) (ids []uint32) {
	x := indexed{in: forKind(key, setAffinityPicks, setNodePortAffinityPicks), from: offset(indexScope(scope)) | ownBit}
	n, _ := v.slots(s, scope)
	for i := range n {
		if data := v.have.element[x.in][keyString(x.key(key, i))]; len(data) == 4 {
			ids = append(ids, binary.NativeEndian.Uint32([]byte(data)))
		}
	}
	return ids
}

// bestList returns the slots of the frontend that has most of what a scope needs. A slot
// without a valid element is empty.
func (v *verification) bestList(s *desired.Service, scope int, affinity *affinityService) (best []target) {
	n, counts := v.slots(s, scope)
	most := 0
	for i := range s.Frontends {
		list := v.listOf(s.Key(&s.Frontends[i]), scope, n, affinity)
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
	for _, t := range list {
		j, ok := slices.BinarySearchFunc(endpoints, t.addr, netip.AddrPort.Compare)
		if ok && (counts == nil && used[j] == 0 || counts != nil && used[j] < counts[j]) {
			used[j]++
			n++
		}
	}
	return n
}

func (v *verification) listOf(key desired.Key, scope, n int, affinity *affinityService) []target {
	x := indexed{in: forKind(key, setEndpoints, setNodePortEndpoints), from: offset(indexScope(scope))}
	if affinity != nil {
		x.in, x.from = forKind(key, setAffinityPicks, setNodePortAffinityPicks), x.from|ownBit
	}
	list := make([]target, n)
	for i := range list {
		data := v.have.element[x.in][keyString(x.key(key, i))]
		if affinity == nil {
			list[i].addr, _ = parseAddrPort(data)
			continue
		}
		if len(data) == 4 {
			list[i].addr = affinity.holder(binary.NativeEndian.Uint32([]byte(data)))
		}
	}
	return list
}

// holder is the endpoint with a number of the service port.
func (s *affinityService) holder(id uint32) netip.AddrPort {
	for addr, slot := range s.slots {
		if s.key()|slot == id&affinityMask {
			return addr
		}
	}
	return netip.AddrPort{}
}
