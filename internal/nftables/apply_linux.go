package nftables

import (
	"context"
	"slices"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"golang.org/x/sys/unix"
)

// stepElements is how many element writes one transaction holds at most, give or
// take one service port. Nobody else in the network namespace can commit
// meanwhile: this many take about a millisecond, and larger steps are no faster.
const stepElements = 500

// applyChanges writes the difference that the update makes to each of its service
// ports.
func (e *Engine) applyChanges(ctx context.Context, update desired.Update) error {
	if !e.state.globals.SameDetection(&update.Globals) {
		return errNotFull
	}
	t := e.beginStep()
	for i := range update.Changes {
		c := &update.Changes[i]
		e.change(t, c.Name, c.After)
		if c.After != nil && t.elements >= stepElements {
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

// change notes the difference between what is placed for a service port and what
// must be; s is nil when it is gone.
func (e *Engine) change(t *transaction, name changetracker.ServicePortName, s *desired.Service) {
	prev := e.state.placed[name]
	var next *placed
	if s != nil {
		next = e.place(prev, s, t)
		e.state.placed[name] = next
	} else {
		delete(e.state.placed, name)
		e.state.affinity.release(name)
	}
	diff(t, prev, next)
	e.state.count(next, 1)
	e.state.count(prev, -1)
}

// place works out where a service port stands in the sets. New classes are noted
// in t.
func (e *Engine) place(prev *placed, s *desired.Service, t *transaction) *placed {
	pl := placer{holds: e.holds, class: func(c class) uint32 { return e.state.classes.exist(c, t) }}
	if s.Affinity > 0 && pl.holds == nil {
		if pl.affinity, _ = e.state.affinity.service(s.Name); pl.affinity == nil {
			e.log.Warn("no affinity ids left, session affinity is off", zap.Stringer("service", s.Name))
		}
	}
	if pl.affinity == nil {
		e.state.affinity.release(s.Name)
	}
	if most := pl.limit(); len(s.Cluster) > most || len(s.Local) > most {
		e.log.Warn("too many endpoints, the rest gets no traffic", zap.Stringer("service", s.Name), zap.Int("limit", most))
	}
	return pl.place(prev, s)
}

// count adds what a service port needs of the shared sets and of the classes.
func (s *state) count(p *placed, n int) {
	if p == nil {
		return
	}
	for i := range p.frontends {
		if p.frontends[i].closed {
			s.clusterIPs.add(p.frontends[i].key.VIP, n)
		}
	}
	for _, a := range p.hairpin {
		s.hairpins.add(a, n)
	}
	if p.health != 0 {
		s.healthPorts.add(p.health, n)
	}
	for c := range p.classes {
		s.classes.count(c, n)
	}
}

func (e *Engine) beginStep() *transaction {
	e.step.reset()
	return &e.step
}

// changedGlobals returns a writer of what differs from the globals in the kernel,
// nil if nothing does.
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
	return func(w *wire) {
		for _, id := range changed {
			w.replaceIntervals(&setSpecs[id], ranges(prefixesOf(want, id)))
			e.report.Writes++
		}
	}
}

// commit writes a step as one transaction, with more after it, and empties it.
// Nothing is sent when there is nothing to write.
func (e *Engine) commit(ctx context.Context, t *transaction, more func(*wire)) error {
	e.state.flushCounts(t)
	if t.empty() && more == nil {
		return nil
	}
	w := e.newBatch()
	if err := e.writeStep(w, t, more); err != nil {
		return err
	}
	t.reset()
	return e.send(ctx, w)
}

func (e *Engine) writeStep(w *wire, t *transaction, more func(*wire)) error {
	for _, c := range t.classes {
		if err := e.writeClass(w, c); err != nil {
			return err
		}
	}
	t.write(w)
	e.report.Writes += t.elements
	if more != nil {
		more(w)
	}
	return nil
}

// writeClass creates the chain of a class, and its elements in the verdict maps.
func (e *Engine) writeClass(w *wire, c class) error {
	from := c.reachedFrom()
	e.report.Writes += 1 + len(from)
	if err := w.chains([]chainSpec{e.state.layout.classChain(c)}); err != nil {
		return err
	}
	for _, in := range from {
		w.verdictElement(&setSpecs[in], uint32(c), c.chain())
	}
	return nil
}

// loadWrites is how much one update may write before our own listeners step
// aside. Each write costs about 10 µs more while anybody listens; stepping aside
// costs a few system calls, and maybe a check of everything afterwards.
const loadWrites = 1000

func (e *Engine) newBatch() *wire {
	e.batch.buf, e.batch.messages = e.batch.buf[:0], e.batch.messages[:0]
	e.batch.batchMarker(unix.NFNL_MSG_BATCH_BEGIN)
	return &e.batch
}

func (e *Engine) send(ctx context.Context, w *wire) error {
	w.batchMarker(unix.NFNL_MSG_BATCH_END)
	e.report.Transactions++
	e.report.Bytes += len(w.buf)
	if e.report.Writes > e.loadWrites {
		if err := e.beginLoad(ctx); err != nil {
			return err
		}
	}
	return e.listeners.transaction(func() error { return e.kernel.commit(ctx, w) })
}
