package poll

import (
	"context"
	"sync"
	"testing"
	"time"
)

// Background runs a function beside the test until stop is called, or the test ends. The function must then return nil
// within Timeout.
func Background(tb testing.TB, run func(context.Context) error) (stop func()) {
	tb.Helper()
	ctx, cancel := context.WithCancel(tb.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				tb.Errorf("what ran beside the test returned %v, want nil", err)
			}
		case <-time.After(Timeout):
			tb.Errorf("what ran beside the test has not returned %v after its context ended", Timeout)
		}
	})
	tb.Cleanup(stop)
	return stop
}
