package namespace

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// idleThreads is how many threads wait for the next visit.
const idleThreads = 32

// Threads runs functions in a network namespace like Visit, many times: its threads stay there
// for the next visit, as a new one costs more than a connection. The zero value is not usable.
type Threads struct {
	netNS string
	calls chan call // without a buffer
	ended chan struct{}

	mu     sync.Mutex // guards all below
	idle   int
	closed bool
	alive  sync.WaitGroup
}

type call struct {
	f    func() error
	done chan error
}

// NewThreads starts nothing yet.
func NewThreads(netNS string) *Threads {
	return &Threads{netNS: netNS, calls: make(chan call), ended: make(chan struct{})}
}

// Visit runs f in the network namespace. Several goroutines may call it at once.
func (t *Threads) Visit(f func() error) error {
	if t.netNS == "" {
		return f()
	}
	c := call{f, make(chan error, 1)}
	t.mu.Lock()
	switch {
	case t.closed:
		t.mu.Unlock()
		return Visit(t.netNS, f)
	case t.idle > 0:
		t.idle--
		t.mu.Unlock()
		select {
		case t.calls <- c: // to a thread that waits, or is about to
		case <-t.ended:
			return Visit(t.netNS, f)
		}
	default:
		t.alive.Add(1)
		t.mu.Unlock()
		go t.thread(c)
	}
	return <-c.done
}

// Close ends the threads, after their last visit. A later Visit has a thread of its own.
func (t *Threads) Close() {
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		close(t.ended)
	}
	t.mu.Unlock()
	t.alive.Wait()
}

// thread serves calls on a thread that ends in the namespace. It avoids the main thread, which
// never ends.
func (t *Threads) thread(c call) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		t.serve(c)
		return
	}
	away := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(away)
		t.serve(c)
	}()
	<-away
	runtime.UnlockOSThread()
}

// serve serves a call and the next ones.
func (t *Threads) serve(c call) {
	defer t.alive.Done()
	if err := enter(t.netNS); err != nil {
		c.done <- err
		return
	}
	for {
		err := c.f()
		stays := t.waits()
		c.done <- err
		if !stays {
			return
		}
		select {
		case c = <-t.calls:
		case <-t.ended:
			return
		}
	}
}

// waits makes the caller an idle thread, unless there are enough.
func (t *Threads) waits() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || t.idle >= idleThreads {
		return false
	}
	t.idle++
	return true
}

func enter(netNS string) error {
	ns, err := Open(netNS)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	if err := netns.Set(ns); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", netNS, err)
	}
	return nil
}
