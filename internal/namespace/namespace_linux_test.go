package namespace_test

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
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
	untilNobodyIsIn(t, there)
}

// Threads stay for the next visit, a few of them, until Close.
func TestThreadsStayUntilClose(t *testing.T) {
	ns := netnstest.New(t)
	there, err := os.Readlink(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	threads := namespace.NewThreads(ns.Path())
	visit := func() (thread int) {
		err := threads.Visit(func() error {
			thread = unix.Gettid()
			if here, err := os.Readlink("/proc/thread-self/ns/net"); here != there || thread == unix.Getpid() {
				t.Errorf("thread %d is in %s, %v, want %s", thread, here, err, there)
			}
			return os.ErrDeadlineExceeded
		})
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("visit = %v, want the error of the function", err)
		}
		return thread
	}
	first := visit()
	for range 100 {
		if again := visit(); again != first {
			t.Fatalf("thread %d, want that of the first visit, %d", again, first)
		}
	}
	var visits, together sync.WaitGroup
	together.Add(50)
	for range 50 {
		visits.Go(func() {
			_ = threads.Visit(func() error { together.Done(); together.Wait(); return nil })
		})
	}
	visits.Wait()
	poll.Until(t, "most threads are out", func() bool { return inside(there) <= 32 })
	visit()
	threads.Close()
	untilNobodyIsIn(t, there)
	visit()
	untilNobodyIsIn(t, there)
	if err := namespace.NewThreads("no-such-namespace").Visit(func() error { return nil }); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("visit of no namespace = %v, want %v", err, os.ErrNotExist)
	}
}

// inside counts the threads in a namespace.
func inside(namespace string) (n int) {
	threads, _ := filepath.Glob("/proc/self/task/*/ns/net")
	for _, thread := range threads {
		if where, _ := os.Readlink(thread); where == namespace {
			n++
		}
	}
	return n
}

func untilNobodyIsIn(t *testing.T, there string) {
	t.Helper()
	poll.Until(t, "all threads are out", func() bool { return inside(there) == 0 })
}
