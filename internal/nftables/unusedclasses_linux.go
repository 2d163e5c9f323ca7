package nftables

import "context"

// spareClasses is the number of unused classes that may stay: endpoint counts change often.
// Each commit in the network namespace walks all chains, so there is a limit.
const spareClasses = 128

// removeUnusedClasses deletes the chains of unused classes if there are many. The elements
// that lead to them are deleted in their own transaction, because kernels before 6.2 count
// them as users within the same one.
func (e *Engine) removeUnusedClasses(ctx context.Context) error {
	unused := e.state.classes.takeUnused()
	if len(unused) == 0 {
		return nil
	}
	e.disturbCheck()
	w := e.newBatch()
	for _, c := range unused {
		for _, in := range c.reachedFrom() {
			w.deleteMark(&setSpecs[in], uint32(c))
			e.report.Writes++
		}
	}
	if err := e.send(ctx, w); err != nil {
		return err
	}
	w = e.newBatch()
	for _, c := range unused {
		w.FlushChain(c.chain())
		w.DeleteChain(c.chain())
		e.report.Writes++
	}
	if err := e.send(ctx, w); err != nil {
		return err
	}
	return e.removeLimitSets(ctx, unused)
}

// removeLimitSets deletes the sets of classes without chains.
func (e *Engine) removeLimitSets(ctx context.Context, unused []class) error {
	w := e.newBatch()
	empty := len(w.Messages)
	for _, c := range unused {
		for _, s := range c.limitSets() {
			w.DeleteSet(s.Name)
			e.report.Writes++
		}
	}
	if len(w.Messages) == empty {
		return nil
	}
	return e.send(ctx, w)
}
