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
)

// ErrUnknownFamily is returned by Apply for a family that is not tracked.
var ErrUnknownFamily = errors.New("IP family is not tracked")

// Step is what one Apply has to bring about.
type Step struct {
	// Before is what was applied so far, service port by service port: one that failed is
	// in it as it was. Its Node is that of the last Apply that succeeded, wholly or in part.
	Before *State
	// After is the newest State.
	After *State
	// Delta is the difference.
	Delta Delta
}

// attempt is one Apply under way.
type attempt struct {
	next     snapshot
	node     Node
	full     int    // family.fullWanted as the State knows it
	sequence uint64 // of the last trigger that the State knows
	counts   pendingCounts
	// carriers are the Changes with triggers.
	carriers []ServicePortName
}

// apply is Tracker.Apply.
func (s *store) apply(name v1.IPFamily, fn func(Step) ([]ServicePortName, error)) error {
	index, ok := familyIndex(name)
	if !ok || s.families[index] == nil {
		return fmt.Errorf("apply %q: %w", name, ErrUnknownFamily)
	}
	f := s.families[index]
	f.applying.Lock()
	defer f.applying.Unlock()
	step, a := s.begin(f)
	failed, err := fn(step)
	if err == nil {
		s.commit(f, a, failed)
	}
	return err
}

// begin builds the newest State and the Delta to it.
func (s *store) begin(f *family) (Step, attempt) {
	var buffer [8]rebuilt
	a, services := s.prepare(f, buffer[:0])
	s.editEndpoints(services) // without the lock, since the hook is not ours
	return s.complete(f, a, services)
}

// prepare makes anew what was dirty, appended to services. What comes from now on waits
// for the next Apply.
func (s *store) prepare(f *family, services []rebuilt) (attempt, []rebuilt) {
	s.mu.Lock()
	defer s.unlock()
	a := attempt{node: s.node, full: f.fullWanted, sequence: s.sequence, counts: f.counts}
	services = f.rebuildDirty(services)
	f.dirtySince = time.Time{}
	f.pendingSince = f.oldestPending()
	return a, services
}

// complete makes a Step of what prepare began.
func (s *store) complete(f *family, a attempt, services []rebuilt) (Step, attempt) {
	s.mu.Lock()
	defer s.unlock()
	f.place(services)
	a.next = f.current
	delta := Delta{Full: a.full != f.fullDone, Changes: f.collect(&a)}
	f.pendingSince = f.oldestPending()
	return Step{Before: f.state(f.committedNode, f.committed), After: f.state(a.node, f.current), Delta: delta}, a
}

func (f *family) state(node Node, s snapshot) *State {
	return &State{family: f.index, node: node, snapshot: s}
}

// rebuilt is the new state of a Service, on its way into current.
type rebuilt struct {
	name  types.NamespacedName
	state *serviceState
	// edit are the ports whose endpoints EditEndpoints is to look at.
	edit []*portState
}

// editEndpoints lets the hook look at what no State has yet. It does not need the lock.
func (c *config) editEndpoints(services []rebuilt) {
	for i := range services {
		for _, p := range services[i].edit {
			p.endpoints = c.edited(p)
		}
	}
}

// rebuildDirty makes anew what was dirty, appended to services, and makes it pending.
func (f *family) rebuildDirty(services []rebuilt) []rebuilt {
	for name := range f.early {
		f.endOverrides(name)
	}
	clear(f.early)
	if len(f.dirty) == 0 {
		return services
	}
	for name, m := range f.dirty {
		services = append(services, f.rebuild(name, m))
		if p := f.pending[name]; p == nil {
			f.pending[name] = m
		} else {
			p.merge(m)
		}
	}
	f.dirty = map[types.NamespacedName]*mark{} // anew, because a map never shrinks
	return services
}

// place brings current up to date.
func (f *family) place(services []rebuilt) {
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

// rebuild makes the new state of a marked Service out of what is held, and of what
// did not change.
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
	for i, key := range keys {
		was := old.find(key)
		p := s.rebuildPort(name, key, was, m.touched(key))
		if ports[i] = p; p == was {
			continue
		}
		edits := p.port != nil && f.options.EditEndpoints != nil
		if edits {
			r.edit = append(r.edit, p)
		}
		if edits || len(s.overrides[key]) > 0 || m.touched(key).repeats() {
			m.touch(touched{portKey: key, all: true}) // any endpoint may have become different
		}
	}
	r.state = newServiceState(ports)
	return r
}

func (s *heldService) rebuildPort(service types.NamespacedName, key portKey, old *portState, t *touched) *portState {
	next := &portState{
		name: ServicePortName{NamespacedName: service, Port: key.port, Protocol: key.protocol},
		port: s.port(key),
	}
	if old != nil && old.port == next.port && t.none() && !t.repeats() {
		return old
	}
	next.merged = s.merge(key, old, t)
	next.endpoints = s.overrides[key].apply(next.merged)
	return next
}

// merge is what slices say of a port's endpoints.
func (s *heldService) merge(key portKey, old *portState, t *touched) []Endpoint {
	switch {
	case t.none() && old != nil:
		return old.merged
	case t.none():
		return nil
	}
	var buffer [16]contribution
	contributions := s.contributions(buffer[:0], key)
	if t.all || old == nil {
		return mergeAll(contributions)
	}
	return mergeTouched(old.merged, contributions, t.addrs)
}

// collect lists the pending differences, sorted by name, and forgets the Services
// whose changes have cancelled out.
func (f *family) collect(a *attempt) []Change {
	if len(f.pending) == 0 {
		return nil
	}
	names := slices.SortedFunc(maps.Keys(f.pending), compareNames)
	changes := make([]Change, 0, len(names))
	for _, name := range names {
		first := len(changes)
		changes = f.compareServices(changes, name)
		if len(changes) == first {
			delete(f.pending, name)
			f.triggers.consume(name, a.sequence)
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

// commit makes the State of an attempt the one that later Deltas start from, but
// for the service ports that failed.
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
	f.counts.applied(a.counts, kept)
	if f.fullDone = a.full; f.fullWanted != f.fullDone {
		f.fullSince = f.dirtySince // the node changed meanwhile
	} else {
		f.fullSince = time.Time{}
	}
	f.pendingSince = f.oldestPending()
}

// stillPending are the failed service ports, which are sorted, that are different
// in next, by Service.
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

// holdBack is after with some ports, sorted, as they were before.
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
