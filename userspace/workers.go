package userspace

import (
	"context"
	"sync"
	"sync/atomic"
)

// workers run functions in goroutines. Some of them stay for the next function: their
// stacks have grown already. To grow new ones is a tenth of the CPU time of a short
// connection.
type workers struct {
	running sync.WaitGroup
	next    chan func() // for a goroutine that is idle
	idle    atomic.Int32
}

// maxIdleWorkers is how many goroutines stay.
const maxIdleWorkers = 64

// Go calls f in a goroutine, which ends with ctx at the latest if f does.
func (w *workers) Go(ctx context.Context, f func()) {
	select {
	case w.next <- f:
	default:
		w.running.Go(func() { w.work(ctx, f) })
	}
}

func (w *workers) work(ctx context.Context, f func()) {
	for {
		f()
		if w.idle.Add(1) > maxIdleWorkers {
			w.idle.Add(-1)
			return
		}
		select {
		case f = <-w.next:
			w.idle.Add(-1)
		case <-ctx.Done():
			w.idle.Add(-1)
			return
		}
	}
}
