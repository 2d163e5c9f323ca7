package nftables

import (
	"context"
	"slices"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"golang.org/x/sys/unix"
)

// applyFull makes the table match the update, whatever the kernel holds. A table of ours,
// of this version or another, is repaired in place while packets use it; extra objects are
// deleted last. Any other table of our name is replaced in one transaction.
func (e *Engine) applyFull(ctx context.Context, update desired.Update, trusted bool) error {
	e.disturbCheck()
	e.fullUpdates.Add(1)
	observed, err := e.observeOrAhead(ctx)
	if err != nil {
		return err
	}
	layout := e.layoutFor(&update.Globals)
	ours := observed != nil && observed.isOurs(&layout)
	if ours && observed.hasLimits() {
		layout.rules.limits = true // until endLimits
	}
	before, err := e.beginFull(ctx, observed, ours)
	if err != nil {
		return err
	}
	hints := e.begin(layout, trusted)
	switch {
	case observed == nil:
		return e.load(ctx, update, hints)
	case e.failedRepairs >= maxFailedRepairs || !ours:
		e.log.Info("replacing the table: it belongs to another program or cannot be repaired",
			zap.String("table", e.config.Names.Table), zap.String("comment", observed.comment))
		return e.replace(ctx, update, hints)
	}
	e.failedRepairs++ // Apply forgets them when it succeeds
	return e.repair(ctx, update, observed, hints, before)
}

// maxFailedRepairs is the number of repairs that may fail in a row before the table is
// replaced. The first failure may be caused by a concurrent change of another program.
const maxFailedRepairs = 2

// begin starts a new state. It returns the placements of the last one, so that endpoints
// keep their indexes.
func (e *Engine) begin(l layout, trusted bool) map[changetracker.ServicePortName]*placed {
	hints, affinity := e.state.placed, e.state.affinity
	if !trusted {
		hints, affinity = nil, newAffinityIDs()
		affinity.last = e.state.affinity.last // records hold numbers of service ports that are gone
	}
	e.state = state{
		layout:        l,
		placed:        make(map[changetracker.ServicePortName]*placed, len(hints)),
		affinity:      affinity,
		classes:       newClassTable(),
		frontends:     make(frontendSets, len(hints)),
		clusterIPs:    newRefCounts(setClusterIPs, clusterIPKey),
		hairpins:      newRefCounts(setHairpin, hairpinKey),
		healthPorts:   newRefCounts(setHealthPorts, healthPortKey),
		fastVIPs:      newRefCounts(setFastVIPs, frontendKey),
		directVIPs:    newRefCounts(setDirectVIPs, frontendKey),
		fastNodePorts: newRefCounts(setFastNodePorts, fastNodePort.key),
	}
	e.step.reset()
	return hints
}

// load creates and fills a table.
func (e *Engine) load(ctx context.Context, update desired.Update, hints map[changetracker.ServicePortName]*placed) error {
	w := e.newBatch()
	if err := e.scaffold(w); err != nil {
		return err
	}
	if err := e.send(ctx, w); err != nil {
		return e.explain(ctx, err, e.features())
	}
	return e.writeAll(ctx, update, &reconciler{t: &e.step}, hints)
}

// replace replaces a table in one transaction, so that packets never miss it.
func (e *Engine) replace(ctx context.Context, update desired.Update, hints map[changetracker.ServicePortName]*placed) error {
	oneStep := func() error { return nil }
	if err := e.placeAll(&update, &reconciler{t: &e.step}, hints, oneStep); err != nil {
		return err
	}
	e.state.flushCounts(&e.step)
	w := e.newBatch()
	w.DeleteTable()
	if err := e.scaffold(w); err != nil {
		return err
	}
	if err := e.writeClasses(w, &e.step); err != nil {
		return err
	}
	e.writeStep(w, &e.step, e.changedGlobals(&update.Globals))
	e.state.globals = update.Globals
	e.step.reset()
	err := e.send(ctx, w)
	if err == nil && e.counting() {
		e.counts.ledger.ForgetAll()
	}
	return err
}

func (e *Engine) scaffold(w *wire) error {
	if err := w.scaffold(&e.state.layout, e.setSize); err != nil {
		return err
	}
	e.report.Writes += len(w.Messages)
	return nil
}

// setSize is the limit of the sets that packets write; 0 is no limit.
func (e *Engine) setSize(spec *setSpec) uint32 {
	switch {
	case spec.id == setRefused:
		return refusedVIPs
	case slices.Contains(counterSets(), spec.id):
		return e.counterLimit
	case spec.flags()&unix.NFT_SET_EVAL != 0:
		return e.config.AffinityRecords
	default:
		return 0
	}
}

func (e *Engine) addrLen() int { return e.state.layout.addrLen() }

// writeAll writes, in steps, all elements that the reconciler does not have, and the
// globals.
func (e *Engine) writeAll(
	ctx context.Context, update desired.Update, r *reconciler, hints map[changetracker.ServicePortName]*placed,
) error {
	stepDone := func() error {
		if r.t.elements < e.stepElements {
			return nil
		}
		return e.commitAll(ctx, r, nil)
	}
	if err := e.placeAll(&update, r, hints, stepDone); err != nil {
		return err
	}
	if err := e.commitAll(ctx, r, e.changedGlobals(&update.Globals)); err != nil {
		return err
	}
	e.state.globals = update.Globals
	return nil
}

// placeAll places every service port, and calls stepDone after each.
func (e *Engine) placeAll(
	update *desired.Update, r *reconciler, hints map[changetracker.ServicePortName]*placed, stepDone func() error,
) error {
	for s := range update.Services() {
		p := e.planElements(hints[s.Name], s, r.t)
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

func (e *Engine) commitAll(ctx context.Context, r *reconciler, more func(*wire)) error {
	e.state.flushCounts(r)
	r.t.moves = r.have != nil
	return e.commit(ctx, r.t, more)
}
