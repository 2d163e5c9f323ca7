package nftables

import "context"

// spareClasses is how many unused classes may stay: endpoint counts come and go,
// and each commit of anybody in the network namespace walks all chains.
const spareClasses = 128

// removeUnusedClasses deletes the chains of classes that nobody needs any more, once
// there are many. The elements that lead to them go in a transaction of their own,
// because kernels before 6.2 still count them as users within the same one.
func (e *Engine) removeUnusedClasses(ctx context.Context) error {
	if e.state.classes.unused <= spareClasses {
		return nil
	}
	unused := e.state.classes.takeUnused()
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
		w.flushChain(c.chain())
		w.deleteChain(c.chain())
		e.report.Writes++
	}
	return e.send(ctx, w)
}
