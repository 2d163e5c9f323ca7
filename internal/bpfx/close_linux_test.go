package bpfx

import (
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/serviceplane/serviceplane/internal/poll"
)

// An object is reachable while it is closed, also if nobody refers to it any more, when a garbage collection comes in
// the middle of Close. For an unreachable one, the library would close the descriptor's number again.
func TestAnObjectIsReachableWhileItIsClosed(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		close     func(*closing) error
		collected bool
	}{
		"Close":      {(*closing).Close, true}, // else this test would find nothing
		"bpfx.Close": {func(c *closing) error { return Close(c) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var collected atomic.Bool
			if err := test.close(newClosing(t, &collected)); err != nil {
				t.Fatal(err)
			}
			if got := collected.Load(); got != test.collected {
				t.Errorf("collected while it was being closed: %t, want %t", got, test.collected)
			}
		})
	}
}

// closing is an object that becomes unreachable while it is being closed, unless its caller keeps it.
type closing struct{ t *testing.T }

func newClosing(t *testing.T, collected *atomic.Bool) *closing {
	t.Helper()
	c := &closing{t}
	runtime.AddCleanup(c, func(collected *atomic.Bool) { collected.Store(true) }, collected)
	return c
}

// Close returns after garbage collections that found what nobody can reach.
func (c *closing) Close() error {
	t := c.t
	for range 3 { // cleanups run in any order
		var other atomic.Bool
		newClosing(t, &other)
		poll.Until(t, "an unreachable object is collected", func() bool {
			runtime.GC()
			return other.Load()
		})
	}
	return nil
}
