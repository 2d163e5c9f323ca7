package bpfx

import (
	"errors"
	"flag"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

var (
	closings = flag.Int64("bpfx.closings", 20_000, "how many descriptors TestNoDescriptorIsClosedTwice closes")
	plain    = flag.Bool("bpfx.plain", false, "close them by the library alone, which closed 26 of 10,000,000 twice")
)

// TestNoDescriptorIsClosedTwice: goroutines duplicate and close the descriptor of a map, while others collect garbage and
// keep the processors busy. A descriptor that was closed twice is one that another goroutine cannot use or close.
func TestNoDescriptorIsClosedTwice(t *testing.T) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 4})
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w: %w", netns.ErrPrivilege, err)
	}
	netnstest.Check(t, err)
	t.Cleanup(func() { netnstest.Check(t, Close(m)) })
	closeOne := func(m *ebpf.Map) error { return Close(m) }
	if *plain {
		closeOne = (*ebpf.Map).Close //nolint:forbidigo // to see what it does
	}
	var begun, failed atomic.Int64
	var closers, others sync.WaitGroup
	for range 8 {
		closers.Go(func() {
			for begun.Add(1) <= *closings {
				clone, err := m.Clone()
				if err == nil {
					err = closeOne(clone)
				}
				if err != nil {
					failed.Add(1)
				}
			}
		})
	}
	others.Go(func() {
		for begun.Load() <= *closings {
			runtime.GC()
		}
	})
	for range 20 {
		others.Go(func() {
			for begun.Load() <= *closings { // as a busy program
			}
		})
	}
	closers.Wait()
	others.Wait()
	if n := failed.Load(); n > 0 {
		t.Errorf("%d of %d descriptors could not be duplicated or closed: they were closed already", n, *closings)
	}
}
