package changetracker

import (
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// family is everything about one IP family. It is guarded by the store's lock,
// but for applying.
//
// An event changes the source of one Service and marks that dirty, no more. Apply
// builds current anew from the sources of the dirty Services, which become
// pending, and the Delta from what differs between committed and current among
// the pending ones. Success makes current committed. Both are persistent maps, so
// that all this costs what changed.
type family struct {
	store *store
	index int
	// applying serialises Apply. Its holder alone writes the fields below pending;
	// lock it before the store.
	applying sync.Mutex

	sources map[types.NamespacedName]*source
	// dirty marks the Services that changed since current was built; dirtySince is
	// when the first of them did, or when the node did.
	dirty      map[types.NamespacedName]*mark
	dirtySince time.Time
	triggers   triggerTimes
	counts     pendingCounts
	// fullWanted counts the reasons for a full sync; fullDone is how many of them
	// a successful Apply has seen.
	fullWanted, fullDone int
	fullSince            time.Time

	// pending marks the Services in which current may differ from committed.
	pending      map[types.NamespacedName]*mark
	pendingSince time.Time
	current      snapshot // the newest State
	committed    snapshot // what the last successful Apply made of it
}

func newFamily(s *store, index int) *family {
	empty := newSnapshot()
	return &family{
		store: s, index: index,
		sources:    map[types.NamespacedName]*source{},
		dirty:      map[types.NamespacedName]*mark{},
		pending:    map[types.NamespacedName]*mark{},
		triggers:   triggerTimes{},
		fullWanted: 1,
		current:    empty, committed: empty,
	}
}

// waiting is the arrival of the oldest change that was not applied.
func (f *family) waiting() time.Time { return earlier(f.dirtySince, f.pendingSince) }

func (f *family) noticed(now time.Time) {
	if f.dirtySince.IsZero() {
		f.dirtySince = now
	}
}

// wantFull makes the next Deltas Full until one is applied.
func (f *family) wantFull(now time.Time) {
	f.fullWanted++
	f.fullSince = earlier(f.fullSince, now)
	f.noticed(now)
}

// mark notes that a Service changed.
func (f *family) mark(name types.NamespacedName) *mark {
	m := f.dirty[name]
	if m == nil {
		m = &mark{since: f.store.now()}
		f.dirty[name] = m
		f.noticed(m.since)
	}
	return m
}

func (f *family) source(name types.NamespacedName) *source {
	s := f.sources[name]
	if s == nil {
		s = &source{}
		f.sources[name] = s
	}
	return s
}

func (f *family) dropIfEmpty(name types.NamespacedName, s *source) {
	if s.empty() {
		delete(f.sources, name)
	}
}

// placePorts makes ports, sorted by name, the service ports of a Service.
func (f *family) placePorts(name types.NamespacedName, ports []*ServicePort) (changed bool) {
	s := f.sources[name]
	if s == nil && len(ports) == 0 {
		return false
	}
	s = f.source(name)
	changed = len(ports) != len(s.ports)
	for i, p := range ports {
		old := s.port(p.key())
		if old == nil || !f.store.samePort(old, p) {
			changed = true
			continue
		}
		ports[i] = old // the same pointer tells that nothing changed
	}
	if changed {
		s.ports = ports
		f.mark(name)
		f.counts.serviceChanged(name)
	}
	f.dropIfEmpty(name, s)
	return changed
}

// placeSlice puts next in the place of the slice of that name; nil takes it out.
func (f *family) placeSlice(service types.NamespacedName, name string, next *heldSlice) (changed bool) {
	s := f.sources[service]
	if s == nil && next == nil {
		return false
	}
	s = f.source(service)
	old := s.slice(name)
	for _, key := range sliceKeys(old, next) {
		t := f.compareSlices(s, key, old, next)
		if !t.none() {
			f.mark(service).touch(t)
			changed = true
		}
	}
	s.put(name, next)
	f.dropIfEmpty(service, s)
	if changed {
		f.counts.slices++
	}
	return changed
}

// held is what is remembered of a slice, or nil.
func (f *family) held(service types.NamespacedName, slice string) *heldSlice {
	if s := f.sources[service]; s != nil {
		return s.slice(slice)
	}
	return nil
}

// setEndpoints makes list, sorted and without duplicates, the hand-built
// endpoints of a service port.
func (f *family) setEndpoints(name ServicePortName, list []Endpoint) (changed bool) {
	key := portKey{port: name.Port, protocol: name.Protocol}
	next := &heldSlice{ports: f.held(name.NamespacedName, "").without(key)}
	if len(list) > 0 {
		next.ports = append(next.ports, portEndpoints{portKey: key, endpoints: list})
	}
	if len(next.ports) == 0 {
		next = nil
	}
	return f.placeSlice(name.NamespacedName, "", next)
}

// sliceKeys are the ports of either slice.
func sliceKeys(old, next *heldSlice) []portKey {
	var buffer [8]portKey
	keys := buffer[:0]
	for _, h := range [...]*heldSlice{old, next} {
		if h == nil {
			continue
		}
		for i := range h.ports {
			if !slices.Contains(keys, h.ports[i].portKey) {
				keys = append(keys, h.ports[i].portKey)
			}
		}
	}
	return keys
}

// compareSlices finds the addresses of a port for which it makes a difference to
// the Service that next comes in the place of old.
func (f *family) compareSlices(s *source, key portKey, old, next *heldSlice) touched {
	var buffer [16]contribution
	before, after := old.endpoints(key), next.endpoints(key)
	others := slices.DeleteFunc(s.contributions(buffer[:0], key), func(c contribution) bool { return c.slice == old })
	t := touched{portKey: key}
	if len(others) == 0 && (len(before) == 0 || len(after) == 0) {
		t.all = true
		return t
	}
	walk(before, after, func(x, y *Endpoint) {
		had, has := record{slice: old, endpoint: x}, record{slice: next, endpoint: y}
		if len(others) > 0 {
			addr := anyOf(x, y).Addr
			rest := winner(others, addr)
			had, has = rest.better(had), rest.better(has)
		}
		if had.endpoint == nil || has.endpoint == nil || !f.store.sameEndpoint(had.endpoint, has.endpoint) {
			t.addrs = append(t.addrs, anyOf(had.endpoint, has.endpoint).Addr)
		}
	})
	return t
}

// anyOf is the one that there is.
func anyOf(x, y *Endpoint) *Endpoint {
	if x != nil {
		return x
	}
	return y
}

// relocate sets anew which endpoints are local, after the node's name changed.
func (f *family) relocate(was, is *Node) {
	for name, s := range f.sources {
		for _, h := range s.slices {
			if next := h.relocated(was, is); next != h {
				f.placeSlice(name, h.name, next)
			}
		}
	}
}

// relocated returns h itself when nothing becomes or ceases to be local.
func (h *heldSlice) relocated(was, is *Node) *heldSlice {
	next := *h
	next.ports = slices.Clone(h.ports)
	moved := false
	for i := range next.ports {
		list := next.ports[i].endpoints
		differs := func(e Endpoint) bool { return was.hosts(e.Node) != is.hosts(e.Node) }
		if !slices.ContainsFunc(list, differs) {
			continue
		}
		moved = true
		list = slices.Clone(list)
		for j := range list {
			if differs(list[j]) {
				list[j].Local = is.hosts(list[j].Node)
			}
		}
		next.ports[i].endpoints = list
	}
	if !moved {
		return h
	}
	return &next
}
