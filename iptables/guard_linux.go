package iptables

import (
	"context"
	"fmt"

	"github.com/serviceplane/serviceplane/proxier"
)

// watcher detects changes by other programs to the chains of an instance. One goroutine
// at a time may use it.
type watcher interface {
	// check returns what another program has changed since the last call, nil if nothing.
	// An expensive check may be postponed, unless it is for everything.
	check(everything bool) (*proxier.Damage, error)
	// during runs a write that changes chains.
	during(chains map[chainID]bool, write func() error) error
	// wrote is check after a write of this engine.
	wrote(o *effect) (*proxier.Damage, error)
	// counters reads the counters of the rules that exist; last returns their values at the last
	// reading. After it, ended returns those of rules that were deleted before.
	counters(ctx context.Context, last func(counterKey) uint64) (counterValues, error)
	// ended returns which counters have ended since the last call.
	ended() endings
	close() error
}

// effect is the state that a write leaves, unless another program interferes.
type effect struct {
	transactions int
	// written are the rules of each written chain, nil if it was deleted; for a built-in
	// chain, those that jump to the instance's chains.
	written map[chainID][]rule
	// have and jumps are the whole state; isFull is true if it has just been read.
	have, jumps map[string]ruleset
	isFull      bool
}

// allChains returns the rules of all chains.
func (o *effect) allChains() map[chainID][]rule {
	all := map[chainID][]rule{}
	for _, tables := range []map[string]ruleset{o.have, o.jumps} {
		for table, chains := range tables {
			for chain, rules := range chains {
				all[chainID{table, chain}] = rules
			}
		}
	}
	return all
}

// guard tracks whether the tables are still as the engine's last write left them. It is
// guarded by engine.mu.
type guard struct {
	watcher watcher // nil until the engine is connected to the kernel
	// intact is the result of the last check; reported means that Watch has reported that the
	// tables are not.
	intact, reported bool
	// known means that the engine has written the tables once.
	known bool
	// news is damage that Watch has not reported, also if a write has repaired it: packets
	// may have passed without rules meanwhile.
	news *proxier.Damage
}

func (g *guard) close() error {
	w := g.watcher
	*g = guard{}
	if w == nil {
		return nil
	}
	return w.close()
}

// check runs before a write, and before the tables are read for one.
func (g *guard) check(everything bool) (intact bool, err error) {
	d, err := g.watcher.check(everything)
	g.record(d)
	return g.intact, watchError(err)
}

// during runs a write.
func (g *guard) during(chains map[chainID]bool, write func() error) error {
	g.intact = false // until wrote has checked
	return g.watcher.during(chains, write)
}

// wrote runs after a write, also after one that had nothing to write.
func (g *guard) wrote(o *effect) error {
	g.reported, g.intact = false, false
	d, err := g.watcher.wrote(o)
	g.intact = err == nil
	g.known = g.known || g.intact
	g.record(d)
	return watchError(err)
}

// record records damage, or nil. After a write that has failed, it may be what that write did.
func (g *guard) record(d *proxier.Damage) {
	switch {
	case d == nil:
		return
	case g.intact:
		g.news = d
	case g.known && g.news == nil:
		g.news = &proxier.Damage{}
	}
	g.intact = false
}

// report returns damage that Watch has to report, or nil.
func (g *guard) report() *proxier.Damage {
	d := g.news
	g.news, g.reported = nil, g.reported || d != nil && !g.intact
	return d
}

func watchError(err error) error {
	if err != nil {
		return fmt.Errorf("watch for changes by other programs: %w", err)
	}
	return nil
}
