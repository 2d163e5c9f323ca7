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

// guard notices changes of the chains by somebody else. It is guarded by Engine.mu.
type guard struct {
	prober *prober
	// known is what the tables look like after our last write, if isKnown.
	known   fingerprint
	isKnown bool
	// since is the generation after our last write, while what it looks like is still
	// to be read: that is not for the sync to wait for.
	since    uint32
	isToRead bool
}

func (g *guard) open(t *tool, netNS string, names chainNames) error {
	p, err := newProber(t.config.family, t.variant, netNS, names.owns)
	if err != nil {
		return fmt.Errorf("watch for changes by others: %w", err)
	}
	g.prober = p
	return nil
}

func (g *guard) close() error {
	if g.prober == nil {
		return nil
	}
	p := g.prober
	g.prober, g.isKnown, g.isToRead = nil, false, false
	return p.close()
}

// remember takes what the tables look like for what they must be.
func (g *guard) remember() error {
	g.isKnown, g.isToRead = false, false
	if g.prober == nil {
		return nil
	}
	if g.prober.isCheap() {
		return g.read()
	}
	var err error
	if g.since, err = g.prober.generation(); err != nil {
		return fmt.Errorf("watch for changes by others: %w", err)
	}
	g.isToRead = true
	return nil
}

func (g *guard) read() error {
	now, err := g.prober.probe()
	if err != nil {
		return fmt.Errorf("watch for changes by others: %w", err)
	}
	g.known, g.isKnown, g.isToRead = now, true, false
	return nil
}

// readLater reads what remember left, and says whether somebody has changed something
// meanwhile.
func (g *guard) readLater() (differ bool, err error) {
	now, err := g.prober.generation()
	if err != nil {
		return false, err
	}
	return now != g.since, g.read()
}

// look says whether the tables look different from what was remembered. A difference
// is told once.
func (g *guard) look() (differ bool, err error) {
	if g.isToRead {
		return g.readLater()
	}
	if !g.isKnown {
		return false, nil
	}
	now, err := g.prober.probe()
	if err != nil || now == g.known {
		return false, err
	}
	g.known = now
	return true, nil
}

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

// look does not wait for a write: what is written meanwhile is ours.
func (e *Engine) look() (differ bool, err error) {
	if !e.mu.TryLock() {
		return false, nil
	}
	defer e.mu.Unlock()
	return e.guard.look()
}
