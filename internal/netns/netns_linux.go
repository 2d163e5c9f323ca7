package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Errors of building and entering namespaces, for errors.Is.
var (
	// ErrPrivilege means that the process may not create or enter namespaces.
	ErrPrivilege = errors.New("lacking privilege")
	// ErrGoexit is what Do returns when its function ended the goroutine, as
	// testing.T.FailNow does.
	ErrGoexit = errors.New("function ended its goroutine")
)

// NS is one network namespace. Several goroutines may call its methods at once, but not
// during or after Close.
type NS struct {
	file  *os.File      // keeps the namespace alive
	ports atomic.Uint32 // how many source ports were given out
}

// New creates a network namespace with loopback up. Duplicate address detection, reverse
// path filter and ICMP rate limits are off, since they would delay or fail tests. The
// error wraps ErrPrivilege if the process lacks the privilege.
func New() (*NS, error) {
	ns := &NS{}
	enter := func() error {
		handle, err := netns.New()
		if err != nil {
			return fmt.Errorf("create network namespace: %w", privilege(err))
		}
		ns.file = os.NewFile(uintptr(handle), "network namespace")
		return nil
	}
	if err := onThread(enter, setUp); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return ns, nil
}

// Close releases the namespace. It ends with the last socket that is open in it. A second
// Close does nothing.
func (n *NS) Close() error {
	if n.file == nil {
		return nil
	}
	if err := n.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("close network namespace: %w", err)
	}
	return nil
}

// Path returns a path for setns(2) and tools such as nsenter(1), valid until Close.
func (n *NS) Path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd())
}

// Do runs f inside the namespace, in a goroutine with its own thread, and returns its
// error. Sockets that f opens stay in the namespace; goroutines that f starts are not in
// it.
func (n *NS) Do(f func() error) error {
	return onThread(n.enter, f)
}

func (n *NS) enter() error {
	if err := netns.Set(netns.NsHandle(n.file.Fd())); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", n.Path(), privilege(err))
	}
	return nil
}

// onThread runs f on an OS thread that enter has moved to another namespace.
func onThread(enter, f func() error) error {
	done := make(chan error, 1)
	go func() {
		err := ErrGoexit
		defer func() { done <- err }()
		err = visit(enter, f)
	}()
	return <-done
}

func visit(enter, f func() error) error {
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open the network namespace of the thread: %w", err)
	}
	defer func() {
		// A thread that cannot go home stays locked, and so dies with the goroutine
		// instead of serving another one from the wrong namespace.
		if netns.Set(home) == nil {
			runtime.UnlockOSThread()
		}
		_ = home.Close()
	}()
	if err := enter(); err != nil {
		return err
	}
	return f()
}

// privilege wraps ErrPrivilege if the errno means that.
func privilege(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w: %w", ErrPrivilege, err)
	}
	return err
}
