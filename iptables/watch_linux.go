package iptables

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// watchPeriod is how often the engine looks whether somebody else has changed its
// chains.
const watchPeriod = time.Second

// Watch implements proxier.Watcher. It looks at the tables every second. Only with the
// nft variant it can tell who changed what.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	tick := time.NewTicker(e.watchPeriod)
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
		if differ != nil {
			damaged(*differ)
		}
	}
}

// look says whether somebody else has changed the tables, once for each write. It does
// not wait for a write, which looks by itself.
func (e *Engine) look() (differ *proxier.Damage, err error) {
	if !e.mu.TryLock() {
		return nil, nil
	}
	defer e.mu.Unlock()
	if !e.trusted || e.guard.isTold {
		return nil, nil // the next write is a full one
	}
	intact, err := e.guard.look(false)
	if err != nil || intact {
		return nil, err
	}
	e.guard.isTold = true
	damage := e.guard.damage // which the next write changes
	return &damage, nil
}

// watcher notices what somebody else does to the chains of an instance. One goroutine at
// a time may use it.
type watcher interface {
	// look returns what somebody else has changed since the last call, nil if nothing. If
	// it is costly it may leave that for later, unless everything is to be looked at.
	look(everything bool) (*proxier.Damage, error)
	// during runs a write.
	during(write func() error) error
	// wrote is look after a write of our own.
	wrote(o *effect) (*proxier.Damage, error)
	close() error
}

// effect is what our own write leaves, if nobody interferes.
type effect struct {
	transactions int
	// written are the rules of each chain that was written, nil if it is gone; of a chain
	// of the kernel, those that jump to ours.
	written map[chainID][]rule
	// have and jumps are all that there are; isFull says that they were just read.
	have   map[string]ruleset
	jumps  map[chainID][]rule
	isFull bool
}

// everything is what all chains hold.
func (o *effect) everything() map[chainID][]rule {
	all := maps.Clone(o.jumps)
	for table, chains := range o.have {
		for chain, rules := range chains {
			all[chainID{table, chain}] = rules
		}
	}
	return all
}

// guard knows whether the tables are what they were after our own last write. It is
// guarded by Engine.mu.
type guard struct {
	watcher watcher // nil watches nothing
	// isIntact says that the tables were what they must be when they were looked at
	// last; isTold that Watch has said that they are not, and damage why.
	isIntact, isTold bool
	damage           proxier.Damage
}

func (g *guard) close() error {
	w := g.watcher
	*g = guard{}
	if w == nil {
		return nil
	}
	return w.close()
}

// look comes before a write, and before what that relies on is read.
func (g *guard) look(everything bool) (intact bool, err error) {
	if g.watcher == nil {
		return true, nil
	}
	d, err := g.watcher.look(everything)
	g.note(d)
	return g.isIntact, watchError(err)
}

// during runs a write.
func (g *guard) during(write func() error) error {
	g.isIntact = false // until it is known
	if g.watcher == nil {
		return write()
	}
	return g.watcher.during(write)
}

// wrote comes after a write, or where there was nothing to write.
func (g *guard) wrote(o *effect) error {
	g.isTold, g.isIntact, g.damage = false, false, proxier.Damage{}
	if g.watcher == nil {
		return nil
	}
	d, err := g.watcher.wrote(o)
	g.isIntact = err == nil
	g.note(d)
	return watchError(err)
}

func (g *guard) note(d *proxier.Damage) {
	if d != nil {
		g.isIntact, g.damage = false, *d
	}
}

func watchError(err error) error {
	if err != nil {
		return fmt.Errorf("watch for changes by others: %w", err)
	}
	return nil
}

// effectOf is what a script has left.
func (e *Engine) effectOf(s *script, isFull bool) *effect {
	written := map[chainID][]rule{}
	for id := range s.chains {
		written[id] = e.have[id.table][id.chain]
		if jumps, ok := e.jumps[id]; ok {
			written[id] = jumps
		}
	}
	return &effect{s.tables, written, e.have, e.jumps, isFull}
}
