package nftables

import (
	"context"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// countedDumps notes each dump of elements, but for sets of counters, which packets write.
type countedDumps struct {
	kernel

	sets *[]string
}

func (k *countedDumps) Dump(ctx context.Context, b *nft.Batch, reset func(), each func([]byte)) error {
	if object := b.Messages[0].Object; strings.HasPrefix(object, "elements") && !strings.HasSuffix(object, "-counters") {
		*k.sets = append(*k.sets, object)
	}
	return k.kernel.Dump(ctx, b, reset, each)
}

// TestATableIsReadAhead: after a restart, the first update takes the table that was read while the Services were listed,
// unless another program has changed anything since.
func TestATableIsReadAhead(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns, m := netnstest.New(t), model{}
		for n := range 12 {
			m[name(n)] = w.service(n)
		}
		mustApply(t, w.engine(t, ns), m.full(w))
		table := ipKeyword(w.family) + " serviceplane"
		for _, c := range []struct {
			before, since string // what another program does
			ours          bool   // or the engine of the other family
			again         bool
		}{
			{},
			{before: "delete set " + table + " fast-vips"}, // as in an older version
			{since: "add table " + table + "-ours", ours: true},
			{since: "add table " + table + "-other", again: true},
			{since: "flush set " + table + " frontends", again: true},
		} {
			if c.before != "" {
				mustNFT(t, ns, c.before)
			}
			e := w.engine(t, ns)
			complete, done := e.readAhead(t.Context()), make(chan struct{})
			if complete == nil {
				t.Fatal("the table of an earlier engine is not read ahead")
			}
			go func() { defer close(done); complete() }()
			change := func() error {
				if c.since != "" {
					mustNFT(t, ns, c.since)
				}
				return nil
			}
			if c.ours {
				netnstest.Check(t, e.listeners.transaction(change))
			} else {
				netnstest.Check(t, change())
			}
			dumps := e.countDumps()
			r := mustApply(t, e, m.full(w))
			if c.again != (len(*dumps) > 0) {
				t.Errorf("%+v: listed %v", c, *dumps)
			}
			if c.before == "" && !c.again && r.Writes != 0 {
				t.Errorf("%+v: %d writes, want none", c, r.Writes)
			}
			<-done
			if e.ahead != nil {
				t.Errorf("%+v: the first update leaves what was read ahead", c)
			}
			mustMatch(t, e, m)
			mustWriteNothing(t, e, m.full(w), "afterwards")
		}
	})
}

// countDumps notes the dumps of all sockets that the engine opens from now on.
func (e *Engine) countDumps() (sets *[]string) {
	open, sets := e.open, new([]string)
	e.open = func() (kernel, error) {
		k, err := open()
		return &countedDumps{k, sets}, err
	}
	return sets
}

// TestNothingIsReadAheadOfAnUpdate: Watch does not wait for an update that is under way, and what was read is not offered after it.
func TestNothingIsReadAheadOfAnUpdate(t *testing.T) {
	t.Parallel()
	w, e := restarted(t)
	e.mu.Lock()
	if e.readAhead(t.Context()) != nil {
		t.Error("read ahead beside an update")
	}
	e.mu.Unlock()
	mustApply(t, e, model{}.full(w))
	if e.readAhead(t.Context()) != nil || e.offer(&ahead{}) {
		t.Error("read ahead after an update")
	}
}

// TestNobodyTakesWhatIsReadAhead: it goes when its context ends.
func TestNobodyTakesWhatIsReadAhead(t *testing.T) {
	t.Parallel()
	_, e := restarted(t)
	ctx, cancel := context.WithCancel(t.Context())
	complete := e.readAhead(ctx)
	if complete == nil || e.ahead == nil {
		t.Fatal("the table of an earlier engine is not read ahead")
	}
	cancel()
	complete()
	if e.ahead != nil {
		t.Error("it stays")
	}
}

// restarted returns an engine that finds the table of an earlier one.
func restarted(t *testing.T) (*world, *Engine) {
	t.Helper()
	w, ns := &world{family: v1.IPv4Protocol}, netnstest.New(t)
	mustApply(t, w.engine(t, ns), model{}.full(w))
	return w, w.engine(t, ns)
}
