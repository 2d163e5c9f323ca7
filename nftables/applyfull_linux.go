package nftables

import (
	"context"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// applyFull brings everything in line with the update, whatever the kernel holds.
// A table with our layout is mended element by element, in steps, and what is too
// much goes last; any other table of our name is replaced in one transaction.
func (e *Engine) applyFull(ctx context.Context, update desired.Update, trusted bool) error {
	observed, err := e.observe(ctx)
	if err != nil {
		return err
	}
	l := e.layoutFor(&update.Globals)
	matches := false
	if observed != nil {
		if matches, err = observed.matches(&l); err != nil {
			return err
		}
	}
	if matches {
		if err := e.observeElements(ctx, observed); err != nil {
			return err
		}
		matches = observed.hasVerdicts(e.specs)
	}
	hints := e.begin(l, trusted)
	switch {
	case matches:
		e.adoptClasses(observed)
		return e.mend(ctx, update, &reconciler{t: &e.step, have: &observed.element}, observed, hints)
	case observed == nil:
		return e.load(ctx, update, hints)
	default:
		e.log.Info("replacing a table of another layout", zap.String("table", e.config.Names.Table))
		return e.replace(ctx, update, hints)
	}
}

// begin starts a new state. It returns what the last one had placed, to keep
// endpoints at their indexes.
func (e *Engine) begin(l layout, trusted bool) map[changetracker.ServicePortName]*placed {
	hints, affinity := e.state.placed, e.state.affinity
	if !trusted {
		hints, affinity = nil, newAffinityIDs()
	}
	e.state = state{
		layout:     l,
		placed:     map[changetracker.ServicePortName]*placed{},
		affinity:   affinity,
		classes:    newClassTable(),
		clusterIPs: newRefCounts(setClusterIPs, clusterIPKey),
		hairpins:   newRefCounts(setHairpin, hairpinKey),
	}
	e.step.reset()
	return hints
}

// load fills a table that does not exist yet.
func (e *Engine) load(ctx context.Context, update desired.Update, hints map[changetracker.ServicePortName]*placed) error {
	w := e.newBatch()
	if err := e.scaffold(w); err != nil {
		return err
	}
	if err := e.send(ctx, w); err != nil {
		return e.explain(ctx, err)
	}
	return e.mend(ctx, update, &reconciler{t: &e.step}, nil, hints)
}

// replace puts a new table in the place of one that is not as it should be, in
// one transaction: no packet sees a moment without.
func (e *Engine) replace(ctx context.Context, update desired.Update, hints map[changetracker.ServicePortName]*placed) error {
	oneStep := func() error { return nil }
	if err := e.placeAll(update.Services, &reconciler{t: &e.step}, nil, hints, oneStep); err != nil {
		return err
	}
	e.state.clusterIPs.settle(&e.step)
	e.state.hairpins.settle(&e.step)
	w := e.newBatch()
	w.deleteTable()
	if err := e.scaffold(w); err != nil {
		return err
	}
	if err := e.writeStep(w, &e.step, e.changedGlobals(&update.Globals)); err != nil {
		return err
	}
	e.state.globals = update.Globals
	e.step.reset()
	return e.send(ctx, w)
}

func (e *Engine) scaffold(w *wire) error {
	if err := w.scaffold(&e.state.layout, e.config.AffinityRecords); err != nil {
		return err
	}
	e.report.Writes += len(w.messages)
	for _, c := range e.state.layout.chains() {
		e.state.classes.chains[c.name] = true
	}
	return nil
}

// mend writes what is missing or wrong in a table of our layout, service port by
// service port, then takes away what is too much.
func (e *Engine) mend(
	ctx context.Context, update desired.Update, r *reconciler, observed *observation,
	hints map[changetracker.ServicePortName]*placed,
) error {
	stepDone := func() error {
		if r.t.elements < stepElements {
			return nil
		}
		return e.commitMend(ctx, r, nil)
	}
	if err := e.placeAll(update.Services, r, observed, hints, stepDone); err != nil {
		return err
	}
	if observed != nil {
		e.state.globals = observed.globals(&update.Globals)
	}
	if err := e.commitMend(ctx, r, e.changedGlobals(&update.Globals)); err != nil {
		return err
	}
	e.state.globals = update.Globals
	if observed == nil {
		return nil
	}
	if err := e.removeRest(ctx, r); err != nil {
		return err
	}
	return e.removeUnusedClasses(ctx)
}

// placeAll puts every service port into the sets, with a call of stepDone after
// each.
func (e *Engine) placeAll(
	services []*desired.Service, r *reconciler, observed *observation,
	hints map[changetracker.ServicePortName]*placed, stepDone func() error,
) error {
	if observed != nil && len(hints) == 0 {
		hints = e.adoptAll(services, observed)
	}
	for _, s := range services {
		p := e.place(hints[s.Name], s, r.t)
		e.state.placed[s.Name] = p
		e.state.count(p, 1)
		diff(r, nil, p)
		if err := stepDone(); err != nil {
			return err
		}
	}
	e.state.affinity.keepOnly(e.state.placed)
	return nil
}

func (e *Engine) commitMend(ctx context.Context, r *reconciler, more func(*wire)) error {
	e.state.clusterIPs.settle(r)
	e.state.hairpins.settle(r)
	return e.commit(ctx, r.t, more)
}

// removeRest deletes the elements that nothing asked for.
func (e *Engine) removeRest(ctx context.Context, r *reconciler) error {
	for id := range r.have {
		keyLen := padded(e.specs[id].key, 4*e.state.layout.rules.addrRegs())
		for key := range r.have[id] {
			first, last := elementOf(key[:keyLen]), elementOf(key[keyLen:])
			r.t.remove(setID(id), first, last)
			if r.t.elements < stepElements {
				continue
			}
			if err := e.commit(ctx, r.t, nil); err != nil {
				return err
			}
		}
	}
	return e.commit(ctx, r.t, nil)
}

func elementOf(b string) elementBytes {
	var e elementBytes
	e.n = uint8(copy(e.buf[:], b))
	return e
}

// spareClasses is how many unused classes may stay: endpoint counts come and go,
// and each commit of anybody in the network namespace walks all chains.
const spareClasses = 128

// removeUnusedClasses deletes the chains of classes that nobody has any more. The
// elements that lead to them go in a transaction of their own, because kernels
// before 6.2 still count them as users within the same one.
func (e *Engine) removeUnusedClasses(ctx context.Context) error {
	unused := e.state.classes.unused(e.state.classesInUse())
	if len(unused) <= spareClasses {
		return nil
	}
	w := e.newBatch()
	for _, c := range unused {
		for _, in := range c.reachedFrom() {
			w.elementMessage(deleteElements(), &e.specs[in], appendElement(nil, nativeMark(c.id), nil, nil))
			e.report.Writes++
		}
	}
	if err := e.send(ctx, w); err != nil {
		return err
	}
	w = e.newBatch()
	for _, c := range unused {
		w.flushChain(c.chain())
		w.deleteChain(c.chain())
		e.report.Writes++
		e.state.classes.remove(c.forwarding)
	}
	for _, chain := range e.state.classes.orphanedAffinityChains() {
		w.flushChain(chain)
		w.deleteChain(chain)
		e.report.Writes++
		delete(e.state.classes.chains, chain)
	}
	return e.send(ctx, w)
}

func (s *state) classesInUse() map[uint32]bool {
	inUse := map[uint32]bool{}
	for _, p := range s.placed {
		for i := range p.frontends {
			f := &p.frontends[i]
			for _, class := range []uint32{f.entry, f.firewalled, f.outside, f.inside} {
				inUse[class] = true
			}
		}
	}
	return inUse
}
