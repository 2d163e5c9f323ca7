package iptables

import (
	"context"
	"fmt"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// watchPeriod is how often the engine looks whether somebody else has changed its
// chains.
const watchPeriod = time.Second

// Watch implements proxier.Watcher. It looks at the tables every second, and cannot
// tell who changed them.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-e.written:
		}
		differ, err := e.look()
		if err != nil {
			return err
		}
		if differ {
			damaged(proxier.Damage{})
		}
	}
}

// look says whether the tables are not what they must be, once for each write. It does
// not wait for a write, which looks by itself.
func (e *Engine) look() (differ bool, err error) {
	if !e.mu.TryLock() {
		return false, nil
	}
	defer e.mu.Unlock()
	if !e.trusted || e.guard.isTold {
		return false, nil // the next write is a full one
	}
	intact, err := e.guard.look(e, true)
	e.guard.isTold = err == nil && !intact
	return e.guard.isTold, err
}

// guard notices changes of the tables by somebody else: whatever is neither what they
// were, nor our own write. It is guarded by Engine.mu.
type guard struct {
	prober *prober // nil watches nothing
	// isIntact says that the tables were what they must be when they were looked at
	// last; isTold that Watch has said that they are not.
	isIntact, isTold bool
	// known is what they looked like.
	known fingerprint
	// generation is that of nf_tables then; since is the one before the write that is
	// under way. isToRead says that known is from before our last write.
	generation, since uint32
	isToRead          bool
	// chains are those that were seen last and that we have not deleted since.
	chains map[chainID]chainState
}

// expectation is what tables must hold, in the kernel's figures.
type expectation interface {
	// entries is how many the legacy variant must count in a table, with those of others.
	entries(table string) int
	// uses are how many rules each chain of ours must have, and jumps to it, in sum.
	uses() map[chainID]int
}

func (g *guard) open(p *prober) { *g = guard{prober: p} }

func (g *guard) close() error {
	if g.prober == nil {
		return nil
	}
	p := g.prober
	g.open(nil)
	return p.close()
}

// begin comes before a write, and before what that relies on is read.
func (g *guard) begin(everything bool) (err error) {
	if everything { // chains that somebody has deleted are made anew
		g.chains = nil
	}
	if g.prober != nil && g.prober.nft != nil {
		g.since, err = g.prober.nft.askGeneration()
	}
	return watchError(err)
}

// look says whether the tables are what they must be. What is known of them is read
// anew after our own writes, if learn says so.
func (g *guard) look(want expectation, learn bool) (intact bool, err error) {
	switch {
	case g.prober == nil:
		return true, nil
	case !g.isIntact:
		return false, nil
	case g.prober.nft != nil:
		err = g.lookNFT(want, learn)
	default:
		var now fingerprint
		now, err = g.prober.probe()
		g.isIntact = now == g.known
	}
	return g.isIntact, watchError(err)
}

// lookNFT lists the chains only if somebody has changed something in nf_tables, or to
// learn.
func (g *guard) lookNFT(want expectation, learn bool) error {
	p := g.prober.nft
	generation, err := p.askGeneration()
	if isNews := generation != g.generation || learn && g.isToRead; err != nil || !isNews {
		return err
	}
	return g.list(func(now fingerprint) bool { return !g.isToRead && now == g.known || g.matches(want) })
}

// list lists the chains, which are as they must be if isIntact says so.
func (g *guard) list(isIntact func(now fingerprint) bool) error {
	now, err := g.prober.probe()
	if err != nil {
		return err
	}
	g.isIntact = isIntact(now)
	g.known, g.chains, g.generation, g.isToRead = now, g.prober.nft.chains, g.prober.nft.generation, false
	return nil
}

// wrote comes after a write of so many transactions. Whoever wrote at the same time
// shows in the number of them, and then in the chains; with the legacy variant in the
// number of entries.
func (g *guard) wrote(transactions int, want expectation) error {
	g.isTold = false
	if g.prober == nil {
		return nil
	}
	g.isIntact, g.isToRead = false, true // until it is known
	if g.prober.legacy != nil {
		now, err := g.prober.probe()
		g.known = now
		g.isIntact = err == nil && int(now.nat.Entries) == want.entries(tableNAT) && int(now.filter.Entries) == want.entries(tableFilter)
		return watchError(err)
	}
	generation, err := g.prober.nft.askGeneration()
	if err == nil && generation-g.since == uint32(transactions) {
		g.isIntact, g.generation = true, generation
		return nil
	}
	if err == nil {
		err = g.list(func(fingerprint) bool { return g.matches(want) })
	}
	return watchError(err)
}

// matches says whether the chains that were listed just now are those that must be
// there, and none was made anew by somebody else.
func (g *guard) matches(want expectation) bool {
	now, uses := g.prober.nft.chains, want.uses()
	if len(now) != len(uses) {
		return false
	}
	for id, use := range uses {
		state, exists := now[id]
		was, known := g.chains[id]
		if !exists || int(state.use) != use || known && was.handle != state.handle {
			return false
		}
	}
	return true
}

// deleted forgets a chain that our own write has deleted.
func (g *guard) deleted(id chainID) { delete(g.chains, id) }

func watchError(err error) error {
	if err != nil {
		return fmt.Errorf("watch for changes by others: %w", err)
	}
	return nil
}

// entries implements expectation: a chain of ours has its rules, a beginning and an end.
func (e *Engine) entries(table string) int {
	const ends = 2
	return e.others[table].entries + e.rules[table] + ends*len(e.have[table])
}

// uses implements expectation.
func (e *Engine) uses() map[chainID]int {
	all := map[chainID]int{}
	for table, chains := range e.have {
		for chain, rules := range chains {
			all[chainID{table, chain}] += len(rules) + e.others[table].jumps[chain]
			for _, r := range rules {
				if to := r.target(); chains[to] != nil {
					all[chainID{table, to}]++
				}
			}
		}
	}
	return all
}
