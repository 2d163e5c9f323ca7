package nftables

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// affinityIDs numbers the service ports with session affinity, and their endpoints, for the
// records that packets write. Numbers are used in turn: a free number is not used again
// soon, because records may still hold it.
type affinityIDs struct {
	services map[changetracker.ServicePortName]*affinityService
	used     map[uint32]bool
	last     uint32
}

type affinityService struct {
	id    uint32
	slots map[netip.AddrPort]uint32
	used  map[uint32]bool
	last  uint32
}

func newAffinityIDs() affinityIDs {
	return affinityIDs{services: map[changetracker.ServicePortName]*affinityService{}, used: map[uint32]bool{}}
}

// service returns the numbers of a service port; ok is false if no number is free.
func (a *affinityIDs) service(name changetracker.ServicePortName) (s *affinityService, ok bool) {
	if s, ok = a.services[name]; ok {
		return s, true
	}
	id, ok := nextFree(a.used, a.last, maxAffinityID)
	if !ok {
		return nil, false
	}
	s = a.adopt(name, id)
	a.last = id // the limit is followed by 1
	return s, true
}

// adopt gives a service port the number that it has in the kernel.
func (a *affinityIDs) adopt(name changetracker.ServicePortName, id uint32) *affinityService {
	s := &affinityService{id: id, slots: map[netip.AddrPort]uint32{}, used: map[uint32]bool{}}
	a.services[name] = s
	a.used[id] = true
	a.last = max(a.last, id)
	return s
}

func (a *affinityIDs) release(name changetracker.ServicePortName) {
	if s, ok := a.services[name]; ok {
		delete(a.used, s.id)
		delete(a.services, name)
	}
}

// keepOnly releases the numbers of all service ports that are not in placed.
func (a *affinityIDs) keepOnly(placed map[changetracker.ServicePortName]*placed) {
	for name := range a.services {
		if placed[name] == nil {
			a.release(name)
		}
	}
}

// key is the first part of the service port's records.
func (s *affinityService) key() uint32 { return s.id << affinitySlotLen }

// endpoint returns the number of an endpoint. One is always free, because no service port
// has more than maxAffinitySlot endpoints at a time; see keep.
func (s *affinityService) endpoint(addr netip.AddrPort) uint32 {
	slot, ok := s.slots[addr]
	if !ok {
		slot, _ = nextFree(s.used, s.last, maxAffinitySlot)
		s.last = slot
		s.adopt(addr, slot)
	}
	return s.key() | slot
}

func (s *affinityService) adopt(addr netip.AddrPort, slot uint32) {
	s.slots[addr] = slot
	s.used[slot] = true
}

// keep releases the endpoints that are in none of the lists.
func (s *affinityService) keep(lists ...desired.Endpoints) {
	for addr, slot := range s.slots {
		if !slices.ContainsFunc(lists, func(list desired.Endpoints) bool { return list.Has(addr) }) {
			delete(s.slots, addr)
			delete(s.used, slot)
		}
	}
}

func nextFree(used map[uint32]bool, last, limit uint32) (n uint32, ok bool) {
	for range limit {
		last = last%limit + 1
		if !used[last] {
			return last, true
		}
	}
	return 0, false
}
