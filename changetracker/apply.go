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
	step, a := f.begin()
	failed, err := fn(step)
	if err == nil {
		f.commit(a, failed)
	}
	return err
}

// begin builds the newest State and the Delta to it.
func (f *family) begin() (Step, attempt) {
	s := f.store
	s.mu.Lock()
	defer s.unlock()
	f.refresh()
	a := attempt{next: f.current, full: f.fullWanted, sequence: s.sequence, counts: f.counts}
	delta := Delta{Full: f.fullWanted != f.fullDone, Changes: f.collect(&a)}
	f.pendingSince = f.oldestPending()
	a.node = s.node
	return Step{Before: f.state(f.committedNode, f.committed), After: f.state(a.node, f.current), Delta: delta}, a
}

func (f *family) state(node Node, s snapshot) *State {
	return &State{family: f.index, node: node, snapshot: s}
}

// refresh brings current up to date and makes what was dirty pending.
func (f *family) refresh() {
	f.dirtySince = time.Time{}
	if len(f.dirty) == 0 {
		return
	}
	e := f.current.edit()
	for name, m := range f.dirty {
		old, _ := e.services.Get(name)
		e.put(name, f.rebuild(name, old, m))
		if p := f.pending[name]; p == nil {
			f.pending[name] = m
		} else {
			p.merge(m)
		}
	}
	f.current = e.snapshot()
	f.dirty = map[types.NamespacedName]*mark{} // anew, because a map never shrinks
}

// rebuild makes the new state of a marked Service out of its source and of what
// did not change.
func (f *family) rebuild(name types.NamespacedName, old *serviceState, m *mark) *serviceState {
	s := f.sources[name]
	if s == nil {
		return nil
	}
	var buffer [16]portKey
	keys := buffer[:0]
	if f.store.endpointsOnly {
		keys = s.endpointKeys(keys)
	}
	for _, p := range s.ports {
		keys = append(keys, p.key())
	}
	ports := make([]*portState, len(keys))
	for i, key := range keys {
		ports[i] = s.rebuildPort(name, key, old.find(key), m.touched(key))
	}
	return newServiceState(ports)
}

func (s *source) rebuildPort(service types.NamespacedName, key portKey, old *portState, t *touched) *portState {
	next := &portState{
		name: ServicePortName{NamespacedName: service, Port: key.port, Protocol: key.protocol},
		port: s.port(key),
	}
	if t.none() {
		if old == nil {
			return next
		}
		if old.port == next.port {
			return old
		}
		next.endpoints, next.localReady = old.endpoints, old.localReady
		return next
	}
	var buffer [16]contribution
	contributions := s.contributions(buffer[:0], key)
	if t.all || old == nil {
		next.endpoints = mergeAll(contributions)
	} else {
		next.endpoints = mergeTouched(old.endpoints, contributions, t.addrs)
	}
	next.localReady = localReady(next.endpoints)
	return next
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
		if times := f.triggers.times(name); len(times) > 0 {
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
func (f *family) commit(a attempt, failed []ServicePortName) {
	s := f.store
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
		m, key := f.pending[name.NamespacedName], portKey{port: name.Port, protocol: name.Protocol}
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
