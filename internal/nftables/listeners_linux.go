package nftables

import (
	"errors"
	"sync"
	"sync/atomic"
)

// listeners are the listeners of all engines of one Provider. They pause while any of the
// engines makes a large change: with a listener in the network namespace, the kernel writes
// a notification for each element.
type listeners struct {
	// mu is held for reading by transactions, and for writing by all who change the fields
	// below, or want no transaction under way.
	mu        sync.RWMutex
	listeners map[*listener]bool
	ports     map[writer]uint32 // of the sockets that the engines write with
	loads     int               // under way
	// before is the kernel's count of transactions at the begin of the first load; ours
	// counts the engines' transactions since then.
	before uint32
	ours   atomic.Uint32
	all    atomic.Uint32 // the engines' transactions, of all times
	used   atomic.Bool   // an engine has accessed the kernel
}

// writer is a socket of an engine: that of its updates, or that for devices.
type writer struct {
	engine  *Engine
	devices bool
}

func newListeners() *listeners {
	return &listeners{listeners: map[*listener]bool{}, ports: map[writer]uint32{}}
}

// add starts a listener, at once or after the current loads. It cannot know of changes
// before that.
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
		l.doubt()
	}
	return nil
}

// remove closes a listener.
func (w *listeners) remove(l *listener) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.listeners, l)
	return l.socket.Close()
}

// writesFrom sets the socket that a writer accesses the kernel with from now on.
func (w *listeners) writesFrom(from writer, port uint32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used.Store(true) // what it reads may change before a listener starts
	w.ports[from] = port
	var errs []error
	for l := range w.listeners {
		errs = append(errs, l.ignore(w.ports))
	}
	return errors.Join(errs...)
}

// transaction runs and counts one transaction of an engine.
func (w *listeners) transaction(commit func() error) error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	err := commit()
	if err == nil {
		w.ours.Add(1)
		w.all.Add(1)
	}
	return err
}

// others is a number that changes with each transaction of another program, and with those of engines that do not share the
// listeners.
func (w *listeners) others(generation func() (uint32, error)) (uint32, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := generation()
	return n - w.all.Load(), err
}

// beginLoad pauses all listeners. generation returns the kernel's count of transactions.
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

// endLoad resumes all listeners, and requests a check of everything if another program
// committed a transaction meanwhile. It requests none from failed, the family whose update
// failed if there is one: its next update is full. Another family's load, which ended before,
// needs the check all the same.
func (w *listeners) endLoad(failed uint8, generation func() (uint32, error)) error {
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
	after, err := generation()
	if err != nil || after-w.before != w.ours.Load() {
		for l := range w.listeners {
			if l.family != failed {
				l.doubt()
			}
		}
	}
	return errors.Join(append(errs, err)...)
}
