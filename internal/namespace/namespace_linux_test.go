package namespace_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// A thread that stays would keep the namespace alive. A program's first Visit is often
// on the main thread, which never ends.
func TestAVisitLeavesNoThreadBehind(t *testing.T) {
	ns := netnstest.New(t)
	there, err := os.Readlink(ns.Path()) // "net:[4026532000]"
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		err := namespace.Visit(ns.Path(), func() error {
			if unix.Gettid() == unix.Getpid() {
				t.Error("the main thread visits")
			}
			if here, err := os.Readlink("/proc/thread-self/ns/net"); here != there {
				t.Errorf("f is in %s, %v, want %s", here, err, there)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	poll.Until(t, "all threads are out", func() bool {
		threads, _ := filepath.Glob("/proc/self/task/*/ns/net")
		for _, thread := range threads {
			if where, _ := os.Readlink(thread); where == there {
				return false
			}
		}
		return len(threads) > 0
	})
}
