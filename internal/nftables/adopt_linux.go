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
	taken := map[uint32]bool{}
	for s := range update.Services() {
		p := &placed{}
		var affinity *affinityService
		for i := range s.Frontends {
			key := s.Key(&s.Frontends[i])
			if s.Affinity > 0 && affinity == nil {
				affinity = e.adoptAffinity(s, key, o, taken)
			}
			for scope := range p.lists {
				if p.lists[scope] == nil {
					p.lists[scope] = slotsOf(o.listOf(key, scope, affinity, s.Endpoints(indexScope(scope)).Len()))
				}
			}
		}
		hints[s.Name] = p
	}
	return hints
}

// adoptAffinity takes over the number of a service port, unless another one has it.
func (e *Engine) adoptAffinity(s *desired.Service, key desired.Key, o *observation, taken map[uint32]bool) *affinityService {
	data := o.element[forKind(key, setAffinityKeys, setNodePortAffinityKeys)][keyString(frontendKey(key))]
	if len(data) != 4 {
		return nil
	}
	id := binary.NativeEndian.Uint32([]byte(data)) >> affinitySlotLen
	if id == 0 || id > maxAffinityID || taken[id] || e.state.affinity.services[s.Name] != nil {
		return nil
	}
	taken[id] = true
	return e.state.affinity.adopt(s.Name, id)
}

// listOf reads the endpoints of one scope under the key of a frontend, in the order of
// their indexes, probably about as many as expected. With session affinity they keep their numbers.
func (o *observation) listOf(key desired.Key, scope int, affinity *affinityService, expected int) []target {
	x := indexed{in: forKind(key, setEndpoints, setNodePortEndpoints), from: offset(indexScope(scope))}
	if affinity != nil {
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

func (o *observation) targetOf(data string, affinity *affinityService) (t target, ok bool) {
	if affinity == nil {
		addr, ok := parseAddrPort(data)
		return target{addr: addr}, ok
	}
	if len(data) != 4 {
		return target{}, false
	}
	id := binary.NativeEndian.Uint32([]byte(data))
	addr, ok := parseAddrPort(o.element[setAffinityEndpoints][data])
	if ok && id&affinityIDMask == affinity.key() && id&affinitySlotMask <= maxAffinitySlot {
		affinity.adopt(addr, id&affinitySlotMask)
	}
	return target{addr: addr, id: id}, ok
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
		wrong := []netip.Prefix{{}}
		switch id {
		case setServiceCIDRs:
			g.ServiceCIDRs = wrong
		case setNodePortAddresses:
			g.NodePortAddresses = wrong
		default:
			g.PodCIDRs = wrong
		}
	}
	return g
}
