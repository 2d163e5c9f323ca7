package nftables

import (
	"context"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// ahead is a reading of the table that an earlier process has left, while the Services are still being listed. The first full
// update takes it. It is valid until another program changes anything in the network namespace. Nobody tells what packets write.
type ahead struct {
	others uint32        // see listeners.others
	read   *observation  // nil if that failed
	done   chan struct{} // closed when the reading is complete
	end    context.CancelFunc
}

// aheadFor is how long a reading waits for the first full update, once it is complete.
const aheadFor = time.Minute

// readAhead begins a reading, with sockets of its own, and returns what completes it and then waits until it is taken, for
// aheadFor, or until ctx ends. It returns nil if there is nothing to read, after an update, or if somebody holds mu, as an update
// does. It leaves errors to the first full update.
func (e *Engine) readAhead(ctx context.Context) (complete func()) {
	reader := e.reader()
	if reader == nil {
		return nil
	}
	others, o, err := reader.observeOurs(ctx)
	if err != nil || o == nil {
		_ = reader.kernel.Close()
		return nil
	}
	o.second = reader.secondSocket(o)
	closeAll := func() {
		_ = reader.kernel.Close()
		o.closeSecond()
	}
	ctx, end := context.WithCancel(ctx)
	a := &ahead{others: others, done: make(chan struct{}), end: end}
	if !e.offer(a) {
		end()
		closeAll()
		return nil
	}
	return func() {
		if err := reader.observeWhole(ctx, o); err == nil {
			a.read = o
		}
		closeAll()
		close(a.done)
		select {
		case <-time.After(aheadFor):
		case <-ctx.Done():
		}
		end()
		e.withdraw(a)
	}
}

// reader returns an engine that reads the table for e; nil if e has begun to write, somebody holds mu, or no socket can be opened.
func (e *Engine) reader() *Engine {
	if !e.mu.TryLock() {
		return nil
	}
	defer e.mu.Unlock()
	if e.fullUpdates.Load() > 0 {
		return nil
	}
	reader, err := e.scratchLocked()
	if err != nil {
		return nil
	}
	if reader.kernel, err = e.open(); err != nil {
		return nil
	}
	reader.askFrom, reader.listeners = e.askFrom, e.listeners
	return reader
}

// observeOurs is observe, with the number of others before it. It returns nil for a table that cannot be repaired.
func (e *Engine) observeOurs(ctx context.Context) (others uint32, o *observation, err error) {
	if others, err = e.others(ctx); err != nil {
		return 0, nil, err
	}
	if o, err = e.observe(ctx); err != nil || o == nil {
		return 0, nil, err
	}
	if l := e.layoutFor(&desired.Globals{}); !o.isOurs(&l) {
		return 0, nil, nil
	}
	return others, o, nil
}

// offer lets the first full update take a reading, unless somebody holds mu.
func (e *Engine) offer(a *ahead) bool {
	if !e.mu.TryLock() {
		return false
	}
	defer e.mu.Unlock()
	if e.fullUpdates.Load() > 0 {
		return false
	}
	e.ahead = a
	return true
}

func (e *Engine) withdraw(a *ahead) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ahead == a {
		e.ahead = nil
	}
}

// others is a number that changes with each transaction of another program: see listeners.others.
func (e *Engine) others(ctx context.Context) (uint32, error) {
	return e.listeners.others(func() (uint32, error) { return e.generation(ctx) })
}

// secondSocket opens a socket to read large sets with, nil if there are none.
func (e *Engine) secondSocket(o *observation) kernel {
	for _, in := range largeSets() {
		if !e.isLarge(o, &setSpecs[in]) {
			continue
		}
		if k, err := e.open(); err == nil { // otherwise one must do
			return k
		}
		break
	}
	return nil
}

func (o *observation) closeSecond() {
	if o.second != nil {
		_ = o.second.Close()
		o.second = nil
	}
}

// observeWhole reads the elements of all sets, except those that packets write.
func (e *Engine) observeWhole(ctx context.Context, o *observation) error {
	if err := e.observeVerdicts(ctx, o); err != nil {
		return err
	}
	if err := e.observeElements(ctx, o); err != nil {
		return err
	}
	o.whole = true
	return nil
}

// observeOrAhead is observe, or takes what is read ahead.
func (e *Engine) observeOrAhead(ctx context.Context) (*observation, error) {
	a := e.ahead
	if e.ahead = nil; a == nil {
		return e.observe(ctx)
	}
	defer a.end()
	for range 2 { // before the end of the reading, and after it
		if now, err := e.others(ctx); err != nil || now != a.others {
			a.end()
			return e.observe(ctx)
		}
		began := time.Now()
		select {
		case <-a.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		e.report.Kernel += time.Since(began)
	}
	if a.read == nil {
		return e.observe(ctx)
	}
	return a.read, nil
}
