package proxier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/runner"
)

// Difference is an object in the kernel that is not as it should be.
type Difference struct {
	// Object is, for example, "element 10.96.0.10 . tcp . 80 of map services in table ip kube-proxy".
	Object string
	// Problem is one of DifferenceMissing, DifferenceUnexpected and DifferenceChanged.
	Problem string
	// Want and Have are what the object should hold and holds, in words of the engine's own
	// tools. Want is empty if the object is unexpected, Have if it is missing. Both may be
	// empty for objects without content.
	Want, Have string
	// Service is the service port that the object is for; the zero name if it is for none or
	// for several, or if that is unknown.
	Service changetracker.ServicePortName
}

// The values of Difference.Problem.
const (
	// DifferenceMissing means that the object is not in the kernel.
	DifferenceMissing = "missing"
	// DifferenceUnexpected means that the object is in the kernel, and should not be.
	DifferenceUnexpected = "unexpected"
	// DifferenceChanged means that the object's content is another one.
	DifferenceChanged = "different"
)

// String returns "object: problem: want …, have …".
func (d Difference) String() string {
	text := d.Object + ": " + d.Problem
	if d.Want != "" {
		text += ": want " + d.Want
	}
	if d.Have != "" {
		text += ": have " + d.Have
	}
	return text
}

// MaxDifferences is how many Differences a Verification lists.
const MaxDifferences = 1000

// Verification is what an engine found in one IP family.
type Verification struct {
	// Checked is the number of objects that were compared: elements, rules, chains, virtual
	// servers, sockets.
	Checked int
	// Differences are at most MaxDifferences, sorted by Object. An engine returns all, in any order.
	Differences []Difference
	// Total is the number of differences, of which Differences may be the first. The Proxier sets it,
	// and Err.
	Total int
	// Err is nil if the kernel was compared; otherwise the rest is empty. It is
	// ErrNotProgrammed before the first successful sync, and errors.ErrUnsupported if the
	// engine cannot verify.
	Err error
}

// Agrees reports whether the kernel was compared, and holds what it should.
func (v *Verification) Agrees() bool { return v.Err == nil && v.Total == 0 }

// Verify compares, in each IP family, the kernel with the State that is programmed: see
// Programmed. It changes nothing. Changes that wait for their sync are no difference. Service
// ports in Status.Failed may differ, and after a failed sync any may.
//
// It waits for a sync that runs. It gives way to a sync that comes, and begins again after it; after
// three of them, the next sync waits: for about as long as a full sync. The error is that of ctx, or
// runner.ErrEnded when Run ends or has ended.
func (p *Proxier) Verify(ctx context.Context) (results map[v1.IPFamily]Verification, err error) {
	if err := p.verifies.lock(ctx); err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	defer p.verifies.unlock()
	for givenWay := 0; ; givenWay++ {
		results, err = p.verify(ctx, givenWay < maxGivenWay)
		if !errors.Is(err, errGivesWay) {
			return results, err
		}
	}
}

// maxGivenWay is how many syncs a call of Verify lets pass: events may never pause.
const maxGivenWay = 3

var errGivesWay = errors.New("a sync comes first")

func (p *Proxier) verify(ctx context.Context, givesWay bool) (map[v1.IPFamily]Verification, error) {
	if err := p.syncing.lock(ctx); err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	defer p.syncing.unlock()
	if isClosed(p.runner.Done()) {
		return nil, fmt.Errorf("verify: %w", runner.ErrEnded)
	}
	var wanted <-chan struct{}
	if givesWay {
		wanted = p.syncing.whenWanted()
	}
	untilEnd, stop := context.WithCancelCause(ctx)
	found := make([]Verification, len(p.families))
	var running, watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-p.runner.Done():
			stop(runner.ErrEnded)
		case <-wanted:
			stop(errGivesWay)
		case <-untilEnd.Done():
		}
	})
	for i, f := range p.families {
		running.Go(func() { found[i] = f.verify(untilEnd) })
	}
	running.Wait()
	err := context.Cause(untilEnd)
	stop(nil)
	watching.Wait()
	if err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	results := make(map[v1.IPFamily]Verification, len(p.families))
	for i, f := range p.families {
		results[f.name] = found[i]
	}
	return results, nil
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// endVerify waits until Verify has returned. A later call returns runner.ErrEnded.
func (p *Proxier) endVerify(ctx context.Context) {
	_ = p.syncing.lock(context.WithoutCancel(ctx)) // which does not end
	p.syncing.unlock()
}

func (f *family) verify(ctx context.Context) Verification {
	var now programmed
	f.locked(func() { now = f.programmed })
	if now.state == nil {
		return Verification{Err: fmt.Errorf("verify: %w in %s", ErrNotProgrammed, f.name)}
	}
	if f.can.Verify == nil {
		return Verification{Err: fmt.Errorf("verify: %w by the engine of %s", errors.ErrUnsupported, f.name)}
	}
	v, err := f.can.Verify(ctx, now.update())
	if err != nil {
		return Verification{Err: fmt.Errorf("verify %s: %w", f.name, err)}
	}
	slices.SortFunc(v.Differences, compareDifferences)
	v.Total = len(v.Differences)
	v.Differences = v.Differences[:min(v.Total, MaxDifferences)]
	return v
}

func compareDifferences(a, b Difference) int {
	return cmp.Or(cmp.Compare(a.Object, b.Object), cmp.Compare(a.Problem, b.Problem), cmp.Compare(a.Want, b.Want), cmp.Compare(a.Have, b.Have))
}

// update returns the full Update that programs this from scratch.
func (p *programmed) update() desired.Update {
	delta := changetracker.Delta{Before: p.state, After: p.state, Full: true}
	return desired.NewUpdater().Next(delta, p.resolver, p.globals, true)
}

// exclusive is a mutex that can be waited for with a context. Who waits gets it in turn.
type exclusive struct {
	mu     sync.Mutex // guards all below
	held   bool
	queue  []chan struct{} // each is closed when its turn has come
	wanted chan struct{}   // to close when somebody waits; nil if the holder does not ask, or knows it
}

func (e *exclusive) lock(ctx context.Context) error {
	turn := e.enqueue()
	if turn == nil {
		return nil
	}
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
		e.giveUp(turn)
		return ctx.Err()
	}
}

// enqueue returns nil if it has the lock, and otherwise what to wait for.
func (e *exclusive) enqueue() chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.held {
		e.held = true
		return nil
	}
	turn := make(chan struct{})
	e.queue = append(e.queue, turn)
	e.tell()
	return turn
}

// tell tells the holder that somebody waits.
func (e *exclusive) tell() {
	if e.wanted != nil && len(e.queue) > 0 {
		close(e.wanted)
		e.wanted = nil
	}
}

// giveUp gives up waiting, and the lock if its turn has come meanwhile.
func (e *exclusive) giveUp(turn chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if i := slices.Index(e.queue, turn); i >= 0 {
		e.queue = slices.Delete(e.queue, i, i+1)
	} else {
		e.pass()
	}
}

func (e *exclusive) unlock() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.wanted = nil
	e.pass()
}

// pass gives the lock to the first that waits.
func (e *exclusive) pass() {
	if e.held = len(e.queue) > 0; e.held {
		close(e.queue[0])
		e.queue = e.queue[1:]
	}
}

// whenWanted returns what is closed when another one waits for the lock. Its holder calls it once.
func (e *exclusive) whenWanted() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	wanted := make(chan struct{})
	e.wanted = wanted
	e.tell()
	return wanted
}
