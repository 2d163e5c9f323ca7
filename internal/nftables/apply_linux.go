package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// stepElements is about the largest number of element writes of one transaction; it may be
// exceeded a few times by one service port, and by several that pass frontends to each other. Other programs
// in the network namespace cannot commit meanwhile: so many writes take about a millisecond,
// and larger steps are no faster.
const stepElements = 500

// applyChanges writes the differences between the update and the kernel, by service port. One that
// loses a frontend to another has a step with it, so that the frontend serves all the time.
func (e *Engine) applyChanges(ctx context.Context, update desired.Update) error {
	if !e.state.globals.SameDetection(&update.Globals) {
		return proxier.ErrNotFull
	}
	if err := e.beginLimits(ctx); err != nil {
		return err
	}
	t, m := e.beginStep(), moves{changes: update.Changes, was: update.Was, now: update.Now, inFront: e.holds != nil}
	for i := range update.Changes {
		if m.written[i] {
			continue
		}
		for c := m.begin(i); c != nil; c = m.next() {
			was := e.state.placed[c.Name]
			e.change(t, c.Name, c.After)
			m.follow(c.Name, was.all(), e.state.placed[c.Name].all())
		}
		t.moves = t.moves || m.begun > 0
		if t.elements >= e.stepElements {
			if err := e.commit(ctx, t, nil); err != nil {
				return err
			}
		}
	}
	if err := e.commit(ctx, t, e.changedGlobals(&update.Globals)); err != nil {
		return err
	}
	e.state.globals = update.Globals
	return e.removeUnusedClasses(ctx)
}

// change adds the difference between the current and the wanted elements of a service port
// to the transaction; s is nil if the service port is deleted.
func (e *Engine) change(t *transaction, name changetracker.ServicePortName, s *desired.Service) {
	prev := e.state.placed[name]
	e.state.count(prev, -1) // first, since it may make room
	var next *placed
	if s != nil {
		next = e.planElements(prev, s, t)
		e.state.placed[name] = next
	} else {
		delete(e.state.placed, name)
		e.state.affinity.release(name)
	}
	diff(e.sink(t, name, prev), prev, next)
	e.state.count(next, 1)
}

// planElements computes the elements of a service port. It adds new classes to t.
func (e *Engine) planElements(prev *placed, s *desired.Service, t *transaction) *placed {
	pl := placer{holds: e.holds, traits: e.traitsOf(s), class: func(c class) uint32 { return e.state.classes.exist(c, t) }, clientLimit: e.clientLimits(s, t)}
	if s.Affinity > 0 && pl.holds == nil {
		if pl.affinity, _ = e.state.affinity.service(s.Name); pl.affinity == nil {
			e.limit(s, errors.New("no number is free for its session affinity, which is off"))
		}
	}
	if pl.affinity == nil {
		e.state.affinity.release(s.Name)
	}
	if most := pl.limit(s); s.Cluster.Len() > most || s.Local.Len() > most {
		e.limit(s, fmt.Errorf("further endpoints than the first %d get no traffic", most))
	}
	return pl.assignIndexes(prev, s)
}

// limit says what of a service port the rules do not have: until it changes, or there is room for a client limit.
func (e *Engine) limit(s *desired.Service, err error) {
	e.limited = append(e.limited, &proxier.ServiceError{Name: s.Name, Err: err, Terminal: !errors.Is(err, errNoRoomForLimit)})
}

// count adds the references of a service port to the shared sets and to the classes.
func (s *state) count(p *placed, n int) {
	if p == nil {
		return
	}
	for i := range p.frontends {
		s.frontends.add(p.frontends[i].key, n)
		if p.frontends[i].closed {
			s.clusterIPs.add(p.frontends[i].key.VIP, n)
		}
		if p.frontends[i].direct {
			s.directVIPs.add(p.frontends[i].key, n)
		}
	}
	for _, a := range p.hairpin {
		s.hairpins.add(a, n)
	}
	if p.health != 0 {
		s.healthPorts.add(p.health, n)
	}
	if p.fast {
		s.countFast(p, n)
	}
	for c := range p.classes {
		s.classes.count(c, n)
	}
}

func (e *Engine) beginStep() *transaction {
	e.step.reset()
	return &e.step
}

// changedGlobals returns a function that writes the globals that differ from the kernel's,
// nil if none does.
func (e *Engine) changedGlobals(want *desired.Globals) func(w *wire) {
	var changed []setID
	for _, id := range intervalSets() {
		if !slices.Equal(prefixesOf(want, id), prefixesOf(&e.state.globals, id)) {
			changed = append(changed, id)
		}
	}
	if len(changed) == 0 {
		return nil
	}
	e.disturbCheck()
	was, is := e.state.globals, *want // copies, so that nothing is allocated if no set has changed
	return func(w *wire) {
		for _, id := range changed {
			w.changeIntervals(&setSpecs[id], prefixesOf(&was, id), prefixesOf(&is, id))
			e.report.Writes++
		}
	}
}

// commit sends a step as one transaction, with more after it, and empties it. An empty step
// is not sent.
func (e *Engine) commit(ctx context.Context, t *transaction, more func(*wire)) error {
	e.state.flushCounts(t)
	if err := e.commitClasses(ctx, t); err != nil {
		return err
	}
	if t.elements == 0 && more == nil {
		return nil
	}
	first, last := e.takeLarge(t)
	if err := e.commitSlots(ctx, first...); err != nil {
		return err
	}
	departed := t.departing
	if t.elements > 0 || more != nil { // the kernel does not count an empty transaction
		w := e.newBatch()
		e.writeStep(w, t, more)
		if err := e.send(ctx, w); err != nil {
			return err
		}
	}
	t.reset()
	if err := e.addRetired(ctx, departed); err != nil { // nothing leads to the last slots any more
		return err
	}
	return e.commitSlots(ctx, last...)
}

// commitClasses creates the chains of new classes. The elements that lead packets there have a later
// transaction: a packet sees the rules from its beginning, so a chain that is younger is empty to it.
func (e *Engine) commitClasses(ctx context.Context, t *transaction) error {
	if len(t.classes) == 0 {
		return nil
	}
	e.disturbCheck()
	w := e.newBatch()
	if err := e.writeClasses(w, t); err != nil {
		return err
	}
	t.classes = t.classes[:0]
	return e.send(ctx, w)
}

func (e *Engine) writeClasses(w *wire, t *transaction) error {
	for _, c := range t.classes {
		if err := e.writeClass(w, c); err != nil {
			return err
		}
	}
	return nil
}

func (e *Engine) writeStep(w *wire, t *transaction, more func(*wire)) {
	t.write(w)
	e.report.Writes += t.elements
	if more != nil {
		more(w)
	}
}

// writeClass creates the chain of a class, and its elements in the verdict maps.
func (e *Engine) writeClass(w *wire, c class) error {
	from := c.reachedFrom()
	e.report.Writes += 1 + len(from)
	for _, s := range c.limitSets() {
		w.NewSet(&s)
		e.report.Writes++
	}
	if err := w.chains([]chainSpec{e.state.layout.classChain(c)}); err != nil {
		return err
	}
	for _, in := range from {
		w.verdictElement(&setSpecs[in], uint32(c), c.chain())
	}
	return nil
}

// loadWrites is the number of writes of one update from which our own listeners pause. With
// a listener in the network namespace each write takes about 10 µs more. A pause costs a
// few system calls, and sometimes a check of the whole table afterwards.
const loadWrites = 1000

func (e *Engine) newBatch() *wire {
	e.batch.Buf, e.batch.Messages = e.batch.Buf[:0], e.batch.Messages[:0]
	e.batch.Begin()
	return &e.batch
}

func (e *Engine) send(ctx context.Context, w *wire) error {
	w.Finish()
	e.report.Transactions++
	e.report.Bytes += len(w.Buf)
	if e.report.Writes > e.loadWrites {
		if err := e.beginLoad(ctx); err != nil {
			return err
		}
	}
	return e.listeners.transaction(func() error { return e.kernel.Commit(ctx, &w.Batch) })
}

// Apply implements proxier.Engine.
func (e *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.counts.forgetLate()
	e.report = proxier.ApplyReport{}
	err := e.apply(ctx, update)
	// The kernel did not know an expression of a rule and knows all of them now: modules were loading,
	// perhaps for the other family or another process. Each rule may wait for another module.
	var refused []string
	for update.Full && isUnknown(err) && !errors.Is(err, proxier.ErrNotSupported) && !slices.Contains(refused, refusedObject(err)) {
		refused = append(refused, refusedObject(err))
		err = e.apply(ctx, update)
	}
	result := proxier.Result{Report: e.report, Left: e.left, Limited: e.limited}
	if err == nil {
		e.left = nil
	}
	return result, err
}

func (e *Engine) apply(ctx context.Context, update desired.Update) error {
	if err := e.connect(); err != nil {
		return err
	}
	trusted := e.trusted
	e.trusted, e.limited = false, nil // unless all goes well
	err := errors.Join(e.findHash(ctx, &update), e.findCounters(ctx, &update), e.findFlowtables(ctx, &update), e.findLimits(ctx, &update))
	switch {
	case err != nil:
	case update.Full:
		err = e.applyFull(ctx, update, trusted)
	case trusted:
		err = e.applyChanges(ctx, update)
	default:
		err = proxier.ErrNotFull
	}
	err = errors.Join(err, e.endLoad(ctx, err))
	if err != nil {
		// The kernel may still send answers to the failed transaction: a new socket does
		// not receive them.
		return e.explainRule(ctx, errors.Join(err, e.disconnect()))
	}
	if e.counting() {
		e.counts.ledger.Applied(&update)
	}
	e.trusted, e.failedRepairs = true, 0
	if update.Full {
		e.syncDevices(ctx)
	}
	return nil
}

// beginLoad pauses the listeners.
func (e *Engine) beginLoad(ctx context.Context) error {
	if e.loading {
		return nil
	}
	e.loading = true
	e.disturbCheck()
	return e.listeners.beginLoad(func() (uint32, error) { return e.generation(ctx) })
}

// endLoad resumes the listeners, if they paused.
func (e *Engine) endLoad(ctx context.Context, outcome error) error {
	if !e.loading {
		return nil
	}
	e.loading = false
	var failed uint8
	if outcome != nil {
		failed = e.batch.Family
	}
	return e.listeners.endLoad(failed, func() (uint32, error) { return e.generation(ctx) })
}
