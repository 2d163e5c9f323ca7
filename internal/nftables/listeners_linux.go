package nftables

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/serviceplane/serviceplane/proxier"
)

// listeners are the listeners of the engines of one Provider. While any of the
// engines loads much, none of them listens: the kernel would write a notification
// for each element as long as anybody in the network namespace does.
type listeners struct {
	// mu is held for reading by transactions, and for writing by who changes the
	// fields below.
	mu        sync.RWMutex
	listeners map[*listener]bool
	ports     map[*Engine]uint32 // of the sockets that the engines write with
	loads     int                // under way
	// before is the kernel's count of transactions when the first of the loads
	// began; ours counts those of the engines since.
	before uint32
	ours   atomic.Uint32
	used   atomic.Bool // there was a transaction
}

func newListeners() *listeners {
	return &listeners{listeners: map[*listener]bool{}, ports: map[*Engine]uint32{}}
}

// add makes a listener listen, at once or after the loads that are under way. What
// happened before it listened it cannot know.
func (w *listeners) add(l *listener) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listeners[l] = true
	if err := l.ignore(w.ports); err != nil {
		return err
	}
	if w.loads == 0 {
		if err := l.join(); err != nil {
			return err
		}
	}
	if w.used.Load() {
		l.damaged(proxier.Damage{})
	}
	return nil
}

// remove closes a listener.
func (w *listeners) remove(l *listener) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.listeners, l)
	return l.socket.close()
}

// writesFrom says which socket an engine writes with from now on.
func (w *listeners) writesFrom(e *Engine, port uint32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ports[e] = port
	var errs []error
	for l := range w.listeners {
		errs = append(errs, l.ignore(w.ports))
	}
	return errors.Join(errs...)
}

// transaction runs one transaction of an engine, and counts it.
func (w *listeners) transaction(commit func() error) error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	w.used.Store(true)
	err := commit()
	if err == nil {
		w.ours.Add(1)
	}
	return err
}

// beginLoad stops listening. generation is how to ask for the kernel's count of
// transactions.
func (w *listeners) beginLoad(generation func() (uint32, error)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.loads++
	if w.loads > 1 {
		return nil
	}
	before, err := generation()
	if err != nil {
		return err
	}
	w.before = before
	w.ours.Store(0)
	var errs []error
	for l := range w.listeners {
		errs = append(errs, l.leave())
	}
	return errors.Join(errs...)
}

// endLoad listens again, and has everything checked if somebody else committed a
// transaction meanwhile. Without generation, after a failure, it does not look.
func (w *listeners) endLoad(generation func() (uint32, error)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.loads--
	if w.loads > 0 {
		return nil
	}
	var errs []error
	for l := range w.listeners {
		errs = append(errs, l.join())
	}
	if generation == nil {
		return errors.Join(errs...)
	}
	after, err := generation()
	if err != nil || after-w.before != w.ours.Load() {
		for l := range w.listeners {
			l.damaged(proxier.Damage{})
		}
	}
	return errors.Join(append(errs, err)...)
}
