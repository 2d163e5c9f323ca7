package namespace

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const netnsDir = "/run/netns/"

// Open opens a network namespace by its path, or by its name under /run/netns.
func Open(netNS string) (netns.NsHandle, error) {
	if !strings.Contains(netNS, "/") {
		netNS = netnsDir + netNS
	}
	ns, err := netns.GetFromPath(netNS)
	if err != nil {
		return netns.None(), fmt.Errorf("open network namespace %s: %w", netNS, err)
	}
	return ns, nil
}

// Visit runs f in a network namespace, which it opens with Open, on a thread that ends
// with f. Files that f opens stay in that namespace; goroutines that f starts are not in
// it.
func Visit(netNS string, f func() error) error {
	if netNS == "" {
		return f()
	}
	return onThread(func() error {
		if err := enter(netNS); err != nil {
			return err
		}
		return f()
	})
}

// onThread runs f on a thread that ends with f; otherwise the thread would run other
// goroutines in the wrong namespace. It avoids the main thread, which never ends and
// would keep the namespace alive.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- onThread(f) // on another thread: this goroutine is locked to the main one
			return
		}
		done <- f()
	}()
	return <-done
}
