package nftables

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

func mustCheck(t *testing.T, e *Engine) []proxier.Difference {
	t.Helper()
	k, err := e.open()
	netnstest.Check(t, err)
	defer k.Close()
	found, err := e.check(t.Context(), k)
	if err != nil {
		t.Fatalf("check: %v", err)
	}
	return found
}

// countChecks counts the checks that begin from now on: each opens a socket.
func countChecks(e *Engine) *atomic.Int64 {
	open, checks := e.open, &atomic.Int64{}
	e.open = func() (kernel, error) { checks.Add(1); return open() }
	return checks
}

// besideKernel is a kernel of which each list may come after something else.
type besideKernel struct {
	kernel
	before func()
}

func (k *besideKernel) Dump(ctx context.Context, b *nft.Batch, reset func(), each func([]byte)) error {
	k.before()
	return k.kernel.Dump(ctx, b, reset, each)
}

// TestChecksBesideChanges: a check reports none of the changes that the engine makes while it reads, and finds what another
// program has changed before.
func TestChecksBesideChanges(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		e, m := w.engine(t, ns), model{}
		mustApply(t, e, m.full(w))
		mustApply(t, e, m.step(w, 30, 20))
		open, oneIn, changes, complete := e.open, 0, 0, 0
		e.open = func() (kernel, error) {
			k, err := open()
			return &besideKernel{k, func() {
				if w.rand.IntN(oneIn) == 0 {
					mustApply(t, e, m.step(w, 30, 1+w.rand.IntN(3)))
					changes++
				}
			}}, err
		}
		for round := range 20 {
			oneIn = 10 + 10*round
			before := changes
			switch found := mustCheck(t, e); {
			case len(found) == 0 && changes > before:
				complete++
			case len(found) > 1 || len(found) == 1 && found[0] != (proxier.Difference{}):
				t.Fatalf("beside changes: %v", found)
			}
		}
		t.Logf("%d of 20 checks are complete beside changes", complete)
		e.open = open
		mustNFT(t, ns, "flush set "+ipKeyword(w.family)+" serviceplane frontends")
		if len(mustCheck(t, e)) == 0 {
			t.Error("a flushed set: no difference")
		}
	})
}

// gated is a kernel without an answer until the gate opens.
type gated struct {
	kernel
	begun, gate chan struct{}
}

func (g *gated) Dump(ctx context.Context, b *nft.Batch, reset func(), each func([]byte)) error {
	select {
	case g.begun <- struct{}{}:
	default:
	}
	<-g.gate
	return g.kernel.Dump(ctx, b, reset, each)
}

// TestAChangeDoesNotWaitForACheck: a check waits for the kernel. Changes are programmed meanwhile. When the kernel answers,
// damage from before the check is found, and repaired.
func TestAChangeDoesNotWaitForACheck(t *testing.T) {
	t.Parallel()
	w := startWatched(t, 20)
	want := canonical(mustList(t, w.ns))
	open, g := w.engine.open, &gated{begun: make(chan struct{}, 1), gate: make(chan struct{})}
	w.engine.open = func() (k kernel, err error) {
		g.kernel, err = open()
		return g, err
	}
	opened := sync.OnceFunc(func() { close(g.gate) })
	defer opened()
	w.pauseListeners(t, func() { mustNFT(t, w.ns, "flush set ip serviceplane cluster-ips") })
	<-g.begun
	full := w.fullSyncs.Load()
	w.OnEndpointSliceUpdate(nil, replaced(w.cluster.slices[7], 1))
	w.sync(t)
	w.OnEndpointSliceUpdate(nil, w.cluster.slices[7])
	w.sync(t)
	if n := w.fullSyncs.Load(); n != full {
		t.Errorf("%d full syncs beside a check, want none", n-full)
	}
	opened()
	poll.Until(t, "repair", func() bool { return canonical(mustList(t, w.ns)) == want })
}

// pauseListeners does something while the listeners pause, as in a load.
func (w *watched) pauseListeners(t *testing.T, do func()) {
	t.Helper()
	e := w.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	netnstest.Check(t, e.beginLoad(t.Context()))
	do()
	netnstest.Check(t, e.endLoad(t.Context(), nil))
}

// TestACheckWithoutDamageIsAll: after a load beside another program, a check finds the table right, and no full sync follows.
func TestACheckWithoutDamageIsAll(t *testing.T) {
	t.Parallel()
	w := startWatched(t, 20)
	checks, full := countChecks(w.engine), w.fullSyncs.Load()
	w.pauseListeners(t, func() { mustNFT(t, w.ns, "add table ip somebody-else") })
	poll.Until(t, "a check", func() bool { return checks.Load() > 0 })
	w.sync(t)
	// After this damage, which is heard, a full sync comes; it is the only one.
	mustNFT(t, w.ns, w.damage("flush map IP serviceplane endpoints"))
	poll.Until(t, "a repair", func() bool { return w.fullSyncs.Load() > full })
	w.sync(t)
	if n, status := w.fullSyncs.Load()-full, w.family(); n != 1 || status.Damaged != 1 {
		t.Errorf("%d full syncs for %d damages, want 1 for 1: %+v", n, status.Damaged, status.LastDamage)
	}
}

// TestWithoutAnAnswerACheckIsAFullSync: whatever keeps a check from reading the table, a full update is wanted.
func TestWithoutAnAnswerACheckIsAFullSync(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e := w.engine(t, netnstest.New(t))
		mustApply(t, e, model{}.full(w))
		e.open = func() (kernel, error) { return nil, errInjected }
		damage := <-watchUntilDamage(t, e)
		if damage != (proxier.Damage{}) {
			t.Errorf("%+v, want a request for a full update", damage)
		}
	})
}
