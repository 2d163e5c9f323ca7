package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Errors of building and entering namespaces, to be told apart with errors.Is.
var (
	// ErrPrivilege says that the process may not create or enter namespaces.
	ErrPrivilege = errors.New("lacking privilege")
	// ErrGoexit is what Do returns when its function ended the goroutine, as
	// testing.T.FailNow does.
	ErrGoexit = errors.New("function ended its goroutine")
)

// NS is one network namespace. Its methods may be called from several goroutines
// at once, but not during or after Close.
type NS struct {
	// file keeps the namespace alive, and is how others find it.
	file *os.File
}

// New makes a network namespace with loopback up, without duplicate address
// detection, reverse path filter and ICMP rate limits, which have no place in a
// network of a few milliseconds. The error wraps ErrPrivilege when the process
// may not do that.
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

// Close lets go of the namespace. What is left in it dies with the last socket
// that is open there. Closing again does nothing.
func (n *NS) Close() error {
	if n.file == nil {
		return nil
	}
	if err := n.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("close network namespace: %w", err)
	}
	return nil
}

// Path names the namespace for setns(2) and for tools such as nsenter(1), as long
// as the namespace is open.
func (n *NS) Path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd())
}

// Do runs f inside the namespace, in a goroutine with a thread of its own, waits
// for it and returns its error. Sockets that f opens stay in the namespace;
// goroutines that f starts are outside.
func (n *NS) Do(f func() error) error {
	return onThread(n.enter, f)
}

func (n *NS) enter() error {
	if err := netns.Set(netns.NsHandle(n.file.Fd())); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", n.Path(), privilege(err))
	}
	return nil
}

// onThread runs f on an OS thread that enter has taken to another namespace.
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

// privilege adds ErrPrivilege to the errnos that mean it.
func privilege(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w: %w", ErrPrivilege, err)
	}
	return err
}
