package nftables

import "context"

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
			w.deleteMark(&e.specs[in], c.id)
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
