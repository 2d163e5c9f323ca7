package ebpf

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// kernel is a set of maps of one IP family. Programs may read it at any time: see sockets.c.
type kernel interface {
	capacity() capacity
	// frontends reads all frontends. An unreadable one is an error.
	frontends() (map[desired.Key]place, error)
	putFrontends(frontends map[desired.Key]place) error
	// removeFrontends ignores those that do not exist.
	removeFrontends(keys []desired.Key) error
	// rangeAt and setRange access one word, at an index below the capacity.
	rangeAt(at place) endpointRange
	setRange(at place, p endpointRange)
	// setEndpoints writes to indices that no range names, and that none has named since awaitGracePeriod.
	setEndpoints(first uint32, endpoints desired.Endpoints)
	hasEndpoints(first uint32, endpoints desired.Endpoints) bool
	// awaitGracePeriod returns when no program uses any more what it read before.
	awaitGracePeriod() error
	// close releases what this process holds. Programs that use the maps keep them.
	close() error
}

// capacity is the size of the maps.
type capacity struct{ frontends, services, endpoints uint32 }

// place is where a frontend leads: a scope of a service.
type place struct{ service, scope uint32 }

// endpointRange is a range of endpoints: the word of sockets.c.
type endpointRange uint64

func newRange(b block, n int, sequence uint16) endpointRange {
	return endpointRange(b.first)<<32 | endpointRange(n)<<16 | endpointRange(sequence)
}

func (p endpointRange) sequence() uint16 { return uint16(p) }

func (p endpointRange) count() int { return int(p >> 16 & math.MaxUint16) }

func (p endpointRange) block() block {
	if p.count() == 0 {
		return block{}
	}
	return block{uint32(p >> 32), rounded(uint32(p.count()))}
}

// layer keeps the maps of one IP family as they should be. It never changes what a program may be
// reading: endpoints are written to a new block, one store of a range publishes them, and the old
// block is used again only when no program can have the old range. So a socket always gets an
// endpoint of one state. A frontend is written after what it leads to, and removed before.
//
// Calls must not overlap.
type layer struct {
	kernel kernel
	unused bool // no program has had the maps yet
	// replace returns empty maps; activate moves the programs to them.
	replace  func(capacity) (kernel, error)
	activate func(kernel) error

	services map[changetracker.ServicePortName]*service
	held     int // frontends in the maps
	ids      *arena
	blocks   *arena
	sequence uint16
	writes   int // of this Apply
	// waiting is what programs may still use; inGracePeriod is too, and free when gracePeriod has a value.
	waiting, inGracePeriod []released
	gracePeriod            chan error
}

// released are indices that are not in use any more.
type released struct {
	arena *arena
	block block
}

// service is what the maps have for a service port.
type service struct {
	carried
	id     uint32
	blocks [scopes]block
}

// graceFrom is how many blocks wait until the kernel is asked to awaitGracePeriod, which takes milliseconds.
const graceFrom = 256

// load starts from what is in the maps. Nothing is written. It returns the frontends that are not
// adopted for one of the service ports: remove them. Maps that another program has written to are
// replaced by empty ones. What nothing leads to may be used afterwards, also what another process has
// released.
func (l *layer) load(wanted map[changetracker.ServicePortName]*carried) (orphans []desired.Key, err error) {
	if err := l.abandon(); err != nil {
		return nil, err
	}
	gracePeriod := make(chan error, 1)
	if l.unused {
		l.unused = false
		gracePeriod <- nil
	} else {
		go func(k kernel) { gracePeriod <- k.awaitGracePeriod() }(l.kernel)
	}
	have, err := l.kernel.frontends()
	next := layer{kernel: l.kernel, services: make(map[changetracker.ServicePortName]*service, len(wanted)), held: len(have)}
	found, ok := next.read(have)
	l.sequence = max(l.sequence, next.sequence) // a socket may have a word of an earlier process
	if ok && len(have) > 0 {
		for name, w := range wanted {
			for key := range w.frontends {
				if at, there := have[key]; there && next.services[name] == nil {
					next.adopt(name, w, found, at.service)
				}
			}
		}
	}
	if err := errors.Join(err, <-gracePeriod); err != nil {
		return nil, err
	}
	if !ok {
		return nil, l.rewrite(nil, l.kernel.capacity().atLeast(need(wanted)))
	}
	l.services, l.held, l.ids, l.blocks = next.services, next.held, next.ids, next.blocks
	for _, s := range found {
		orphans = slices.AppendSeq(orphans, maps.Keys(s.frontends))
		l.release(s)
	}
	return orphans, nil
}

// abandon forgets what waits.
func (l *layer) abandon() (err error) {
	if l.gracePeriod != nil {
		err = <-l.gracePeriod
	}
	l.waiting, l.inGracePeriod, l.gracePeriod = nil, nil, nil
	return err
}

// read returns what the maps have, by the index of the service. ok is false if that cannot be.
func (l *layer) read(have map[desired.Key]place) (found map[uint32]*service, ok bool) {
	size := l.kernel.capacity()
	found = map[uint32]*service{}
	var ids, blocks []block
	for key, at := range have {
		if at.service >= size.services || at.scope >= scopes {
			return nil, false
		}
		s := found[at.service]
		if s == nil {
			s = &service{id: at.service, carried: carried{frontends: map[desired.Key]int{}}}
			found[at.service] = s
			ids = append(ids, block{s.id, 1})
			for scope := range s.blocks {
				p := l.kernel.rangeAt(place{s.id, uint32(scope)})
				s.blocks[scope], l.sequence = p.block(), max(l.sequence, p.sequence())
				if s.blocks[scope].size > 0 {
					blocks = append(blocks, s.blocks[scope])
				}
			}
		}
		s.frontends[key] = int(at.scope)
	}
	var idsFit, blocksFit bool
	l.ids, idsFit = arenaAround(size.services, ids)
	l.blocks, blocksFit = arenaAround(size.endpoints, blocks)
	return found, idsFit && blocksFit
}

// adopt takes what was found for a service port. A service that has other frontends too is not adopted: a
// program that has looked up one of them would get the endpoints of another service port.
func (l *layer) adopt(name changetracker.ServicePortName, w *carried, found map[uint32]*service, id uint32) {
	s := found[id]
	if s == nil || !within(s.frontends, w.frontends) {
		return
	}
	for scope, endpoints := range w.endpoints {
		p := l.kernel.rangeAt(place{s.id, uint32(scope)})
		if p.count() == endpoints.Len() && l.kernel.hasEndpoints(s.blocks[scope].first, endpoints) {
			s.endpoints[scope] = endpoints
		}
	}
	l.services[name] = s
	delete(found, id)
}

// within reports whether all frontends of a are those of b.
func within(a, b map[desired.Key]int) bool {
	for key, scope := range a {
		if other, there := b[key]; !there || other != scope {
			return false
		}
	}
	return true
}

// rewrite fills new maps, of this size at least, and moves the programs to them. If it fails before
// that, nothing has changed. If the programs cannot be moved, services is nil: some programs may have
// the new maps, so load must follow.
func (l *layer) rewrite(wanted map[changetracker.ServicePortName]*carried, size capacity) error {
	k, err := l.replace(size.atLeast(need(wanted)))
	if err != nil {
		return err
	}
	size = k.capacity()
	next := layer{
		kernel: k, replace: l.replace, activate: l.activate, sequence: l.sequence, writes: l.writes,
		services: make(map[changetracker.ServicePortName]*service, len(wanted)), ids: newArena(size.services), blocks: newArena(size.endpoints),
	}
	if _, err := next.add(wanted); err != nil {
		return errors.Join(err, k.close())
	}
	if err := l.activate(k); err != nil {
		l.services = nil
		return errors.Join(err, k.close())
	}
	_ = l.abandon() // what waits does not exist in the new maps
	old := l.kernel
	*l = next
	return old.close()
}

// add gives the maps those service ports that they lack, and returns these. Their frontends are written at
// once. After an error they have none; publish goes on from there.
func (l *layer) add(wanted map[changetracker.ServicePortName]*carried) (added []changetracker.ServicePortName, err error) {
	all := make(map[desired.Key]place, len(wanted))
	for name, w := range wanted {
		if l.services[name] != nil {
			continue
		}
		s, err := l.fill(nil, w)
		if s != nil {
			l.services[name] = s // with what it has got
		}
		if err != nil {
			return nil, err
		}
		for key, scope := range w.frontends {
			all[key] = place{s.id, uint32(scope)}
		}
		added = append(added, name)
	}
	if !l.hasRoom(len(all)) {
		return nil, errFull
	}
	if err := l.put(all); err != nil {
		return nil, err
	}
	l.held += len(all)
	for _, name := range added {
		l.services[name].frontends = wanted[name].frontends
	}
	return added, nil
}

func (c capacity) atLeast(o capacity) capacity {
	return capacity{max(c.frontends, o.frontends), max(c.services, o.services), max(c.endpoints, o.endpoints)}
}

// need is the size of maps that have room for these service ports and half as many more.
func need(wanted map[changetracker.ServicePortName]*carried) (size capacity) {
	for _, w := range wanted {
		size.services++
		size.frontends += uint32(len(w.frontends))
		for _, endpoints := range w.endpoints {
			if n := endpoints.Len(); n > 0 {
				size.endpoints += rounded(uint32(n))
			}
		}
	}
	for _, n := range []*uint32{&size.services, &size.frontends, &size.endpoints} {
		*n = max(*n+*n/2, 64)
	}
	return size
}

// withdraw removes the frontends of a service port that it should not have any more; w may be nil.
func (l *layer) withdraw(name changetracker.ServicePortName, w *carried) error {
	s := l.services[name]
	if s == nil {
		return nil
	}
	var gone []desired.Key
	for key := range s.frontends {
		if !w.has(key) {
			gone = append(gone, key)
		}
	}
	if err := l.remove(gone); err != nil {
		return err
	}
	if len(gone) > 0 {
		s.frontends = maps.Clone(s.frontends)
		for _, key := range gone {
			delete(s.frontends, key)
		}
	}
	if w == nil {
		l.release(s)
		delete(l.services, name)
	}
	return nil
}

func (l *layer) remove(keys []desired.Key) error {
	if len(keys) == 0 {
		return nil
	}
	if err := l.kernel.removeFrontends(keys); err != nil {
		return fmt.Errorf("remove %d frontends of sockets: %w", len(keys), err)
	}
	l.held -= len(keys)
	l.writes += len(keys)
	return nil
}

// publish makes a service port what it should be, after withdraw.
func (l *layer) publish(name changetracker.ServicePortName, w *carried) error {
	err := l.tryPublish(name, w)
	if errors.Is(err, errFull) {
		if err = l.free(true); err == nil {
			err = l.tryPublish(name, w)
		}
	}
	if !errors.Is(err, errFull) {
		return err
	}
	all := make(map[changetracker.ServicePortName]*carried, len(l.services)+1)
	for other, s := range l.services {
		all[other] = &s.carried
	}
	all[name] = w
	return l.rewrite(all, l.kernel.capacity())
}

// tryPublish returns errFull if the maps have no room. If a frontend changes its scope, the service port
// gets another index: so no socket gets the new endpoints of the old scope.
func (l *layer) tryPublish(name changetracker.ServicePortName, w *carried) error {
	before := l.services[name]
	if before.is(w) {
		return nil
	}
	s, added := before, len(w.frontends)
	if before != nil {
		added -= len(before.frontends) // which all stay
		if !within(before.frontends, w.frontends) {
			s = nil
		}
	}
	if !l.hasRoom(added) {
		return errFull
	}
	s, err := l.fill(s, w)
	if before == nil && s != nil {
		l.services[name] = s // with what it has got
	}
	if err != nil {
		return err
	}
	lacking := map[desired.Key]place{} // some may lead elsewhere now
	for key, scope := range w.frontends {
		if _, there := s.frontends[key]; !there {
			lacking[key] = place{s.id, uint32(scope)}
		}
	}
	s.frontends = w.frontends // withdraw has removed all others
	l.held += added           // also after an error: withdraw ignores those that do not exist
	err = l.put(lacking)
	l.services[name] = s
	if before != nil && s != before {
		l.release(before)
	}
	if err != nil || s != before {
		return err
	}
	l.clear(s, w)
	return nil
}

// clear removes the endpoints of scopes to which no frontend leads any more.
func (l *layer) clear(s *service, w *carried) {
	for scope := range s.blocks {
		if w.endpoints[scope].Len() == 0 && s.blocks[scope].size > 0 {
			l.kernel.setRange(place{s.id, uint32(scope)}, 0)
			l.wait(l.blocks, s.blocks[scope])
			s.blocks[scope], s.endpoints[scope] = block{}, desired.Endpoints{}
			l.writes++
		}
	}
}

// hasRoom reports whether so many more frontends fit.
func (l *layer) hasRoom(n int) bool { return uint64(l.held+n) <= uint64(l.kernel.capacity().frontends) }

// put writes frontends.
func (l *layer) put(frontends map[desired.Key]place) error {
	if len(frontends) == 0 {
		return nil
	}
	l.writes += len(frontends)
	if err := l.kernel.putFrontends(frontends); err != nil {
		return fmt.Errorf("add %d frontends of sockets: %w", len(frontends), err)
	}
	return nil
}

// is reports whether nothing is to be written; s may be nil.
func (s *service) is(w *carried) bool {
	if s == nil || !maps.Equal(s.frontends, w.frontends) {
		return false
	}
	for scope, endpoints := range w.endpoints {
		if !s.endpoints[scope].Equal(endpoints) || endpoints.Len() == 0 && s.blocks[scope].size > 0 {
			return false
		}
	}
	return true
}

// errFull means that the maps have no room.
var errFull = errors.New("maps are full")

// fill writes and publishes the endpoints of a service port; s is nil if it is new.
func (l *layer) fill(s *service, w *carried) (*service, error) {
	if s == nil {
		id, ok := l.ids.allocate(1)
		if !ok {
			return nil, errFull
		}
		s = &service{id: id.first}
		for scope := range s.blocks {
			l.kernel.setRange(place{s.id, uint32(scope)}, 0)
		}
	}
	for scope, endpoints := range w.endpoints {
		if endpoints.Len() == 0 || s.endpoints[scope].Equal(endpoints) {
			continue
		}
		b, ok := l.blocks.allocate(uint32(endpoints.Len()))
		if !ok {
			return s, errFull
		}
		l.kernel.setEndpoints(b.first, endpoints)
		l.sequence++
		l.kernel.setRange(place{s.id, uint32(scope)}, newRange(b, endpoints.Len(), l.sequence))
		l.wait(l.blocks, s.blocks[scope])
		s.blocks[scope], s.endpoints[scope] = b, endpoints
		l.writes += endpoints.Len() + 1
	}
	return s, nil
}

// release lets the indices of a service port wait.
func (l *layer) release(s *service) {
	l.wait(l.ids, block{s.id, 1})
	for _, b := range s.blocks {
		l.wait(l.blocks, b)
	}
}

// wait lets a block wait, which may be empty.
func (l *layer) wait(a *arena, b block) {
	if b.size > 0 {
		l.waiting = append(l.waiting, released{a, b})
	}
}

// free gives back what no program uses any more. With wait, that is all; without, it never waits.
func (l *layer) free(wait bool) error {
	if l.gracePeriod != nil {
		if !wait && len(l.gracePeriod) == 0 {
			return nil
		}
		if err := l.give(<-l.gracePeriod); err != nil {
			return err
		}
	}
	if n := len(l.waiting); n == 0 || n < graceFrom && !wait {
		return nil
	}
	l.inGracePeriod, l.waiting = l.waiting, nil
	if wait {
		return l.give(l.kernel.awaitGracePeriod())
	}
	l.gracePeriod = make(chan error, 1)
	go func(k kernel, done chan<- error) { done <- k.awaitGracePeriod() }(l.kernel, l.gracePeriod)
	return nil
}

// give gives back what has gracePeriod.
func (l *layer) give(err error) error {
	if err != nil {
		l.waiting = append(l.waiting, l.inGracePeriod...)
	} else {
		for _, r := range l.inGracePeriod {
			r.arena.give(r.block)
		}
	}
	l.gracePeriod, l.inGracePeriod = nil, nil
	return err
}

// close ends the use of the maps by this process.
func (l *layer) close() error {
	return errors.Join(l.abandon(), l.kernel.close())
}

// dump prints the frontends in the maps.
func dump(w io.Writer, k kernel) error {
	all, err := k.frontends()
	if err != nil {
		return err
	}
	for _, at := range slices.SortedFunc(maps.Keys(all), desired.Key.Compare) {
		to := all[at]
		p := k.rangeAt(to)
		if _, err := fmt.Fprintf(w, "socket %v: service %d, %d endpoints from %d\n", at, to.service, p.count(), p.block().first); err != nil {
			return fmt.Errorf("print the frontends of sockets: %w", err)
		}
	}
	return nil
}
