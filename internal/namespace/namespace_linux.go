package namespace

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const netnsDir = "/run/netns/"

// Open opens a network namespace: a path, or a name under /run/netns.
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

// Visit runs f inside a network namespace, as Open names it, on a thread that ends with
// it. What f opens stays in that namespace; goroutines that it starts are outside.
func Visit(netNS string, f func() error) error {
	if netNS == "" {
		return f()
	}
	ns, err := Open(netNS)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }() // f has what it needs
	return onThread(func() error {
		if err := netns.Set(ns); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", netNS, err)
		}
		return f()
	})
}

// onThread runs f on a thread that ends with it, or else it would serve others in the
// wrong namespace. The main thread never ends, and would keep the namespace alive.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- onThread(f) // on another one, as this goroutine holds the main thread
			return
		}
		done <- f()
	}()
	return <-done
}
