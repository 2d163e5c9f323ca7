package changetracker

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// family is the state of one IP family. The store's lock guards it, except for applying.
//
// An event only changes the held objects of one Service and marks it dirty. Apply rebuilds the
// dirty Services in current, which makes them pending, and compares the pending ones in
// committed and current to get the Delta. A success makes current committed. Both are
// persistent maps, so all of this costs what changed.
type family struct {
	*config

	index int
	node  *Node // that of the store
	// applying serialises Apply. Only its holder writes the fields from pending on. Lock it
	// before the store.
	applying sync.Mutex

	services map[types.NamespacedName]*heldService
	// dirty marks the Services with changes that current does not have. dirtySince is when the
	// first of them, or the node, changed. The queue orders them; it is nil before the first Apply,
	// which takes all.
	dirty      map[types.NamespacedName]*mark
	queue      *queue
	dirtySince time.Time
	// early names Services with overrides that may have arrived before their endpoints.
	early    map[types.NamespacedName]struct{}
	triggers triggerTimes
	counts   pendingCounts
	// fullWanted counts the reasons for a full sync, and fullDone how many of them a successful
	// Apply has included.
	fullWanted, fullDone int
	fullSince            time.Time

	// pending marks the Services that may differ between current and committed.
	pending      map[types.NamespacedName]*mark
	pendingSince time.Time
	current      snapshot // the newest State, without what is dirty
	committed    snapshot // the State after the last successful Apply
	// committedNode is the node of that Apply.
	committedNode Node
	// applied are the Versions that committed has, but for service ports that failed. upToDate
	// means that no Apply has begun since.
	applied  Versions
	upToDate bool
}

func newFamily(c *config, index int, node *Node) *family {
	empty := newSnapshot(c.options.IndexEndpoints)
	return &family{
		config: c, index: index, node: node,
		services:   map[types.NamespacedName]*heldService{},
		dirty:      map[types.NamespacedName]*mark{},
		early:      map[types.NamespacedName]struct{}{},
		pending:    map[types.NamespacedName]*mark{},
		triggers:   triggerTimes{},
		fullWanted: 1,
		current:    empty, committed: empty,
	}
}

// waiting returns when the oldest change that is not applied arrived.
func (f *family) waiting() time.Time { return earlier(f.dirtySince, f.pendingSince) }

// notify tells the receiver that there are changes.
func (f *family) notify() {
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// changedAt notifies the receiver of a change.
func (f *family) changedAt(now time.Time) {
	f.notify()
	if f.dirtySince.IsZero() {
		f.dirtySince = now
	}
}

// wantFull makes Deltas Full until one is applied.
func (f *family) wantFull(now time.Time) {
	f.fullWanted++
	f.fullSince = earlier(f.fullSince, now)
	f.changedAt(now)
}

// mark records that a Service changed.
func (f *family) mark(name types.NamespacedName) *mark {
	m := f.dirty[name]
	if m == nil {
		m = &mark{name: name, since: f.now()}
		f.dirty[name] = m
		if f.queue != nil {
			f.queue.add(m)
		}
		f.changedAt(m.since)
	}
	return m
}

func (f *family) service(name types.NamespacedName) *heldService {
	s := f.services[name]
	if s == nil {
		s = &heldService{}
		f.services[name] = s
	}
	return s
}

func (f *family) dropIfEmpty(name types.NamespacedName, s *heldService) {
	if s.empty() {
		delete(f.services, name)
	}
}

// placePorts replaces the ports that a Source has of a Service. They are sorted by name.
func (f *family) placePorts(from string, name types.NamespacedName, ports []*ServicePort) (changed bool) {
	s := f.services[name]
	if s == nil && len(ports) == 0 {
		return false
	}
	s = f.service(name)
	ports = s.offer(from, f.exposed(ports))
	byName := func(x, y **ServicePort) int { return (*x).Name.Compare((*y).Name) }
	walk(s.ports, ports, byName, func(old, next **ServicePort) {
		switch {
		case old == nil || next == nil:
			changed = true
			// Endpoint changes were not marked while the Service did not have the port.
			f.mark(name).touch(touched{portKey: (*anyOf(old, next)).key(), all: true})
			f.move(name, valueOf(old), valueOf(next))
		case f.samePort(*old, *next):
			*next = *old // the same pointer means that nothing changed
		default:
			changed = true
			f.move(name, *old, *next)
		}
	})
	if changed {
		s.ports = ports
		f.counts.serviceChanged(name)
	}
	f.dropIfEmpty(name, s)
	return changed
}

// move records which frontends a Service wins or loses.
func (f *family) move(name types.NamespacedName, from, to *ServicePort) {
	if m := f.mark(name); f.queue != nil {
		f.queue.move(m, from, to, f.node)
	}
}

func valueOf(p **ServicePort) *ServicePort {
	if p == nil {
		return nil
	}
	return *p
}

// placeSlice replaces the slice of that name; nil removes it.
func (f *family) placeSlice(service types.NamespacedName, name sliceName, next *heldSlice) (changed bool) {
	s := f.services[service]
	if s == nil && next == nil {
		return false
	}
	s = f.service(service)
	changed = f.compareSlices(service, s, sliceOf(s.slices, name), next)
	s.slices = withSlice(s.slices, name, next)
	f.dropIfEmpty(service, s)
	return changed
}

// held returns the stored slice, or nil.
func (f *family) held(service types.NamespacedName, slice sliceName) *heldSlice {
	if s := f.services[service]; s != nil {
		return sliceOf(s.slices, slice)
	}
	return nil
}

// setEndpoints replaces the hand-built endpoints that a Source has of a service port. The list
// is sorted and has no duplicates.
func (f *family) setEndpoints(from string, name ServicePortName, list []Endpoint) (changed bool) {
	s, key := f.service(name.NamespacedName), name.key()
	var next *heldSlice
	if len(list) > 0 {
		next = &heldSlice{sliceName: sliceName{from: from}, ports: []numberedKey{{portKey: key}}, endpoints: list}
	}
	changed = f.placeByHand(from, name.NamespacedName, s, key, next)
	f.dropIfEmpty(name.NamespacedName, s)
	return changed
}

func (f *family) placeByHand(from string, service types.NamespacedName, s *heldService, key portKey, next *heldSlice) (changed bool) {
	name := sliceName{from: from}
	changed = f.compareSlices(service, s, sliceOf(s.byHand[key], name), next)
	switch list := withSlice(s.byHand[key], name, next); {
	case len(list) == 0:
		delete(s.byHand, key)
	case s.byHand == nil:
		s.byHand = map[portKey][]*heldSlice{key: list}
	default:
		s.byHand[key] = list
	}
	return changed
}

// uses reports whether the endpoints of a port matter. A slice may have thousands of ports that
// its Service does not have.
func (f *family) uses(s *heldService, key portKey) bool {
	return f.endpointsOnly || s.port(key) != nil
}

// manySlices is how many slices of a Service a changed endpoint is looked up in, if all of its
// endpoints count as changed already: lookups in more would cost a long first list its square.
const manySlices = 32

// compareSlices marks what changes in the Service when next replaces old.
func (f *family) compareSlices(service types.NamespacedName, s *heldService, old, next *heldSlice) (changed bool) {
	var buffer [8]portKey
	keys := next.keys(old.keys(buffer[:0]))
	slices.SortFunc(keys, portKey.compare)
	for _, key := range slices.Compact(keys) {
		if !f.uses(s, key) {
			continue
		}
		all := len(s.slices) > manySlices && f.dirty[service].touches(key)
		if t := f.comparePort(s, key, all, old, next); !t.none() {
			f.mark(service).touch(t)
			changed = true
		}
	}
	if changed {
		f.mark(service).slices++
		f.counts.slices++
	}
	return changed
}

// comparePort returns the addresses of a port whose winning record changes when next replaces
// old. If all count as changed already, it looks at no other slice.
func (f *family) comparePort(s *heldService, key portKey, all bool, old, next *heldSlice) touched {
	var ours [2][2]contribution
	before := slices.AppendSeq(ours[0][:0], old.contributions(key))
	after := slices.AppendSeq(ours[1][:0], next.contributions(key))
	t := touched{portKey: key}
	if (len(before) == 0 || len(after) == 0) && !s.hasOthers(key, old) {
		t.all = true
		return t
	}
	byNumber := func(x, y *contribution) int { return cmp.Compare(x.number, y.number) }
	walk(before, after, byNumber, func(x, y *contribution) { f.compareContributions(&t, s, all, x, y) })
	slices.SortFunc(t.addrs, netip.AddrPort.Compare)
	return t
}

// hasOthers reports whether slices other than one have endpoints for a port.
func (s *heldService) hasOthers(key portKey, but *heldSlice) bool {
	for c := range s.contributions(key) {
		if c.slice != but {
			return true
		}
	}
	return false
}

// compareContributions is comparePort for one port number. Only addresses whose own record differs
// are looked up in the other slices.
func (f *family) compareContributions(t *touched, s *heldService, all bool, before, after *contribution) {
	number := anyOf(before, after).number
	var was, is contribution
	if before != nil {
		was = *before
	}
	if after != nil {
		is = *after
	}
	sameAddr := func(x, y *Endpoint) int {
		if number == 0 {
			return x.Addr.Compare(y.Addr)
		}
		return x.Addr.Addr().Compare(y.Addr.Addr())
	}
	sameAge := before != nil && after != nil && was.slice.created.Equal(is.slice.created)
	walk(was.endpoints, is.endpoints, sameAddr, func(x, y *Endpoint) {
		if sameAge && x != nil && y != nil && f.sameRecord(x, y) {
			return
		}
		if all {
			t.all = true
			return
		}
		had, has := record{slice: was.slice, endpoint: x}, record{slice: is.slice, endpoint: y}
		addr := anyOf(before, after).addr(anyOf(x, y))
		rest := s.winner(t.portKey, addr, was.slice)
		had, has = rest.better(had), rest.better(has)
		if had.endpoint == nil || has.endpoint == nil || !f.sameRecord(had.endpoint, has.endpoint) {
			t.addrs = append(t.addrs, addr)
		}
	})
}

func (f *family) override(name ServicePortName, addr netip.AddrPort, o Override) (changed bool) {
	key := name.key()
	s := f.service(name.NamespacedName)
	defer f.dropIfEmpty(name.NamespacedName, s)
	if !s.override(key, addr, o) {
		return false
	}
	if !f.has(s, key, addr) {
		f.early[name.NamespacedName] = struct{}{}
		return false
	}
	f.mark(name.NamespacedName).touch(touched{portKey: key, again: true})
	return true
}

// has reports whether the next State has an endpoint, apart from what EditEndpoints does.
func (f *family) has(s *heldService, key portKey, addr netip.AddrPort) bool {
	return f.uses(s, key) && s.winner(key, addr, nil).endpoint != nil
}

// endOverrides deletes the overrides of endpoints that a Service does not have.
func (f *family) endOverrides(name types.NamespacedName) {
	s := f.services[name]
	if s == nil {
		return
	}
	for key, list := range s.overrides {
		maps.DeleteFunc(list, func(addr netip.AddrPort, _ []Override) bool { return !f.has(s, key, addr) })
		if len(list) == 0 {
			delete(s.overrides, key)
		}
	}
	f.dropIfEmpty(name, s)
}
