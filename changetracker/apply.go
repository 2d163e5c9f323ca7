package changetracker

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/sorted"
)

// ErrUnknownFamily is returned by Apply for a family that is not tracked.
var ErrUnknownFamily = errors.New("IP family is not tracked")

// attempt is an Apply that is running.
type attempt struct {
	next     snapshot
	node     Node
	full     int    // family.fullWanted when the State was built
	sequence uint64 // of the last trigger that the State includes
	changes  uint64 // of Services that the State includes
	more     bool   // something is left that the State does not include
	heard    Versions
	// carriers are the names of the Changes that have triggers.
	carriers []ServicePortName
}

// applyFor is Tracker.Apply for its owner, or for others.
func (s *store) applyFor(lent bool, family v1.IPFamily, part Part, fn func(Delta) ([]ServicePortName, error)) error {
	if lent {
		return ErrLent
	}
	return s.apply(family, &part, fn)
}

// apply is Tracker.ApplyPart.
func (s *store) apply(name v1.IPFamily, part *Part, fn func(Delta) ([]ServicePortName, error)) error {
	index, ok := familyIndex(name)
	if !ok || s.families[index] == nil {
		return fmt.Errorf("apply %q: %w", name, ErrUnknownFamily)
	}
	f := s.families[index]
	f.applying.Lock()
	defer f.applying.Unlock()
	delta, a := s.begin(f, part)
	failed, err := fn(delta)
	if err == nil {
		s.commit(f, a, failed)
	}
	return err
}

// begin builds the next State, and returns the Delta that leads to it.
func (s *store) begin(f *family, part *Part) (Delta, attempt) {
	var buffer [8]rebuilt
	a, services := s.prepare(f, part, buffer[:0])
	s.editEndpoints(services) // without the lock: this runs code of the embedding program
	return s.complete(f, a, services)
}

// prepare rebuilds the dirty Services of a part, and appends them to services. Later events wait for the
// next Apply.
func (s *store) prepare(f *family, part *Part, services []rebuilt) (attempt, []rebuilt) {
	s.mu.Lock()
	defer s.unlock()
	first := len(services)
	a := attempt{node: s.node, full: f.fullWanted, sequence: s.sequence, changes: f.counts.sequence, heard: s.heard}
	f.upToDate = false
	var few [8]*mark
	services = f.rebuildAll(services, f.take(few[:0], part, a.full != f.fullDone))
	for i := range services[first:] {
		s.report(services[first+i].findings(f.index))
	}
	f.dirtySince = time.Time{}
	if oldest := f.queue.all.first(); oldest != nil {
		a.more, f.dirtySince = true, oldest.since
		f.notify()
	}
	f.pendingSince = f.oldestPending()
	return a, services
}

// complete puts what prepare built into the newest State, and returns the Delta.
func (s *store) complete(f *family, a attempt, services []rebuilt) (Delta, attempt) {
	s.mu.Lock()
	defer s.unlock()
	f.putServices(services)
	a.next = f.current
	changes := f.collect(&a)
	f.pendingSince = f.oldestPending()
	return Delta{Before: f.state(f.committedNode, f.committed), After: f.state(a.node, f.current), Full: a.full != f.fullDone, More: a.more, Changes: changes}, a
}

func (f *family) state(node Node, s snapshot) *State {
	return &State{family: f.index, node: node, snapshot: s}
}

// rebuilt is the new state of a Service that is not in current yet.
type rebuilt struct {
	name  types.NamespacedName
	state *serviceState
	aside int // how many endpoints are too many
	// edit are the ports whose endpoints go through EditEndpoints.
	edit []*portState
}

// editEndpoints runs the hook on states that are not in any State yet, so it does not need the
// lock.
func (c *config) editEndpoints(services []rebuilt) {
	for i := range services {
		for _, p := range services[i].edit {
			p.endpoints = sorted.Of(c.edited(p))
		}
	}
}

// rebuildAll rebuilds dirty Services, appends them to services and makes them pending.
func (f *family) rebuildAll(services []rebuilt, dirty []*mark) []rebuilt {
	for name := range f.early {
		f.endOverrides(name)
	}
	clear(f.early)
	for _, m := range dirty {
		services = append(services, f.rebuild(m.name, m))
		f.counts.taken += m.slices
		if p := f.pending[m.name]; p == nil {
			f.pending[m.name] = m
		} else {
			p.merge(m)
		}
	}
	return services
}

// putServices puts rebuilt Services into current.
func (f *family) putServices(services []rebuilt) {
	if len(services) == 0 {
		return
	}
	e := f.current.edit()
	for i := range services {
		for _, p := range services[i].edit {
			p.share(f.config)
		}
		e.put(services[i].name, services[i].state)
	}
	f.current = e.snapshot()
}

// rebuild builds the new state of a marked Service from its held objects, and reuses the ports
// that did not change.
func (f *family) rebuild(name types.NamespacedName, m *mark) rebuilt {
	r := rebuilt{name: name}
	f.endOverrides(name)
	s := f.services[name]
	if s == nil {
		return r
	}
	old, _ := f.current.services.Get(name)
	var buffer [16]portKey
	keys := buffer[:0]
	if f.endpointsOnly {
		keys = s.endpointKeys(keys)
	}
	for _, p := range s.ports {
		keys = append(keys, p.key())
	}
	ports := make([]*portState, len(keys))
	limit := endpointLimit(len(keys), s.ports)
	for i, key := range keys {
		was := old.find(key)
		p := s.rebuildPort(name, key, was, m.touched(key), limit)
		ports[i] = p
		r.aside += p.aside
		if p == was {
			continue
		}
		edits := p.port != nil && f.options.EditEndpoints != nil
		if edits {
			r.edit = append(r.edit, p)
		}
		if edits || len(s.overrides[key]) > 0 || m.touched(key).repeats() || p.aside > 0 || was.isCut() {
			m.touch(touched{portKey: key, all: true}) // any endpoint may have changed
		}
	}
	r.state = newServiceState(ports)
	return r
}

// maxServiceEndpoints is how many endpoints all ports of a Service have together in an IP family.
// Ports and endpoints of a slice are lists of their own, so that a slice of 1 MB could make
// millions, which is more than any node has memory for.
const maxServiceEndpoints = 1 << 17

// endpointLimit returns how many endpoints each of a Service's ports may have.
func endpointLimit(keys int, ports []*ServicePort) int {
	return max(1, min(maxServiceEndpoints/max(keys, 1), maxPairs/max(frontends(ports), 1)))
}

func (s *heldService) rebuildPort(service types.NamespacedName, key portKey, old *portState, t *touched, limit int) *portState {
	next := &portState{
		name: ServicePortName{NamespacedName: service, Port: key.port, Protocol: key.protocol},
		port: s.port(key),
	}
	if !old.fits(limit) {
		t = &touched{portKey: key, all: true}
	}
	if old != nil && old.port == next.port && t.none() && !t.repeats() {
		return old
	}
	next.merged, next.aside = s.merge(key, old, t, limit)
	if next.endpoints = next.merged; len(s.overrides[key]) > 0 {
		next.endpoints = sorted.Of(s.overrides[key].apply(next.merged.Slice(), next.port))
	}
	return next
}

// merge returns the endpoints of a port according to the slices: those with the lowest addresses,
// and how many more the slices have.
func (s *heldService) merge(key portKey, old *portState, t *touched, limit int) (merged endpointList, aside int) {
	switch {
	case t.none() && old != nil:
		return old.merged, old.aside
	case t.none():
		return merged, 0
	}
	total, count, long := 0, 0, false
	for c := range s.contributions(key) {
		total, count, long = total+len(c.endpoints), count+1, long || len(c.endpoints) > limit
	}
	if !long && !t.all && count > 1 && old != nil && !old.isCut() {
		if merged = s.mergeTouched(key, old.merged, t.addrs); merged.Len() <= limit {
			return merged, 0
		}
	}
	merged, more := s.mergeAll(key, limit)
	if more {
		aside = total - limit
	}
	return merged, aside
}

// isCut reports whether the port has not all endpoints of its slices.
func (p *portState) isCut() bool { return p != nil && p.aside > 0 }

// fits reports whether the port has as many endpoints as a limit allows.
func (p *portState) fits(limit int) bool {
	return p == nil || p.merged.Len() <= limit && (p.aside == 0 || p.merged.Len() == limit)
}

// kindsOfEndpoints tell the problems of a Service's endpoints from those of the Service itself.
var kindsOfEndpoints = perFamily[string]{"endpoints of IPv4", "endpoints of IPv6"} // read-only

// findings has the problem that there are too many endpoints, or none.
func (r *rebuilt) findings(family int) findings {
	f := findings{object: objectKey{kind: kindsOfEndpoints[family], NamespacedName: r.name}}
	if r.aside > 0 {
		f.problems = []Problem{{
			Object: objectKey{kind: kindService, NamespacedName: r.name}.String(), Field: kindsOfEndpoints[family],
			Value: fmt.Sprintf("%d of all ports are not used", r.aside), Reason: ReasonTooMany,
		}}
	}
	return f
}

// collect lists the pending changes, sorted by name, and drops Services whose changes have
// cancelled out.
func (f *family) collect(a *attempt) []PortChange {
	if len(f.pending) == 0 {
		return nil
	}
	names := slices.SortedFunc(maps.Keys(f.pending), compareNames)
	changes := make([]PortChange, 0, len(names))
	for _, name := range names {
		first := len(changes)
		changes = f.compareServices(changes, name)
		if len(changes) == first {
			delete(f.pending, name)
			f.triggers.consume(name, a.sequence)
			f.counts.serviceApplied(name, a.changes)
			continue
		}
		if times := f.triggers.times(name, a.sequence); len(times) > 0 {
			changes[first].Triggers = times
			a.carriers = append(a.carriers, changes[first].Name)
		}
	}
	return changes
}

func compareNames(a, b types.NamespacedName) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

func (f *family) oldestPending() (oldest time.Time) {
	if f.fullWanted != f.fullDone {
		oldest = f.fullSince
	}
	for _, m := range f.pending {
		oldest = earlier(oldest, m.since)
	}
	return oldest
}

// commit makes the State of an attempt the base of later Deltas, except for the service ports
// that failed.
func (s *store) commit(f *family, a attempt, failed []ServicePortName) {
	s.mu.Lock()
	defer s.unlock()
	failed = slices.Clone(failed)
	slices.SortFunc(failed, ServicePortName.Compare)
	failed = slices.Compact(failed)
	for _, carrier := range a.carriers {
		if _, found := slices.BinarySearchFunc(failed, carrier, ServicePortName.Compare); !found {
			f.triggers.consume(carrier.NamespacedName, a.sequence)
		}
	}
	kept := f.stillPending(a.next, failed)
	for name := range f.pending {
		if kept[name] == nil {
			f.counts.serviceApplied(name, a.changes)
		}
	}
	f.counts.slicesApplied()
	pending := make(map[types.NamespacedName]*mark, len(kept))
	e := a.next.edit()
	for name, keys := range kept {
		before, _ := f.committed.services.Get(name)
		after, _ := a.next.services.Get(name)
		e.put(name, holdBack(before, after, keys))
		pending[name] = f.pending[name]
		maps.DeleteFunc(pending[name].refreshed, func(key portKey, _ struct{}) bool { return !slices.Contains(keys, key) })
	}
	f.committed, f.committedNode, f.pending = e.snapshot(), a.node, pending
	if f.fullDone = a.full; f.fullWanted != f.fullDone {
		f.fullSince = f.dirtySince // the node changed meanwhile
	} else {
		f.fullSince = time.Time{}
	}
	f.pendingSince = f.oldestPending()
	if a.more {
		return
	}
	f.applied, f.upToDate = a.heard, true
	f.heard(s.heard)
}

// stillPending returns the failed service ports that differ in next, by Service. failed is
// sorted.
func (f *family) stillPending(next snapshot, failed []ServicePortName) map[types.NamespacedName][]portKey {
	kept := map[types.NamespacedName][]portKey{}
	for _, name := range failed {
		m, key := f.pending[name.NamespacedName], name.key()
		if m == nil {
			continue
		}
		if _, differs := f.comparePorts(f.committed.find(name), next.find(name), m); differs {
			kept[name.NamespacedName] = append(kept[name.NamespacedName], key)
		}
	}
	return kept
}

// holdBack returns after, with some ports replaced by those of before. The keys are sorted.
func holdBack(before, after *serviceState, keys []portKey) *serviceState {
	var ports []*portState
	if after != nil {
		ports = slices.DeleteFunc(slices.Clone(after.ports), func(p *portState) bool {
			_, found := slices.BinarySearchFunc(keys, p.key(), portKey.compare)
			return found
		})
	}
	for _, key := range keys {
		if p := before.find(key); p != nil {
			ports = append(ports, p)
		}
	}
	slices.SortFunc(ports, func(a, b *portState) int { return a.name.Compare(b.name) })
	return newServiceState(ports)
}
