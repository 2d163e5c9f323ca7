package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"
)

// Runner calls a function within the limits of its Options. Its methods may be
// called from several goroutines at once.
type Runner struct {
	options Options
	run     func(context.Context) error
	wake    chan struct{} // holds at most one request
	ended   chan struct{} // closed when Run has ended

	mu      sync.Mutex // guards all below
	started bool
	waiting []chan error // one for each Sync that waits for the next run
}

// New returns a Runner that calls run. It starts nothing.
func New(options Options, run func(context.Context) error) (*Runner, error) {
	options = options.WithDefaults()
	err := options.Validate()
	if run == nil {
		err = errors.Join(err, errors.New("the function to run is nil"))
	}
	if err != nil {
		return nil, err
	}
	return &Runner{options: options, run: run, wake: make(chan struct{}, 1), ended: make(chan struct{})}, nil
}

// Trigger requests a run. Requests before the run starts coalesce. Trigger never blocks. A
// request before Run is kept until Run; a request after Run does nothing.
func (r *Runner) Trigger() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Sync requests a run, waits for one that starts after the call, and returns its error. It
// returns ErrEnded if Run ends first, and the context's error if the context does. Before
// Run is called it waits. The function itself must not call Sync: that would be a deadlock.
func (r *Runner) Sync(ctx context.Context) error {
	select {
	case <-r.ended:
		return ErrEnded
	default:
	}
	done := make(chan error, 1)
	r.mu.Lock()
	r.waiting = append(r.waiting, done)
	r.mu.Unlock()
	r.Trigger()
	select {
	case err := <-done:
		return err
	case <-r.ended:
		return lastResult(done)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// lastResult returns the error of the last run if it has served this Sync.
func lastResult(done <-chan error) error {
	select {
	case err := <-done:
		return err
	default:
		return ErrEnded
	}
}

// Done is closed when Run has ended, and never if it is not called.
func (r *Runner) Done() <-chan struct{} { return r.ended }

// Run calls the function with ctx when it is due, until ctx ends. It returns nil after the
// last call has returned. Run may be called once; a second call returns an error.
func (r *Runner) Run(ctx context.Context) error {
	if err := r.begin(); err != nil {
		return err
	}
	defer close(r.ended)
	limit := newBucket(r.options.MinInterval, r.options.Burst)
	retry := backoff{Backoff: r.options.Retry}
	pause := r.options.MaxInterval
	for r.due(ctx, pause) && r.gather(ctx) && limit.wait(ctx) {
		limit.take()
		err := r.once(ctx)
		limit.refillFrom(time.Now())
		pause = r.options.MaxInterval
		if err == nil {
			retry.reset()
		} else if p := retry.next(); pause == Never || p < pause {
			pause = p
		}
	}
	return nil
}

func (r *Runner) begin() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.started {
		return errors.New("Run was called twice")
	}
	r.started = true
	return nil
}

// due waits for a request or for the end of the pause. It reports false if ctx ends.
func (r *Runner) due(ctx context.Context, pause time.Duration) bool {
	var over <-chan time.Time
	if pause != Never {
		timer := time.NewTimer(pause)
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-r.wake:
	case <-over:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// gather waits until no further request comes for a while, or a Sync waits. It reports false if ctx ends.
func (r *Runner) gather(ctx context.Context) bool {
	if r.options.Gather == Immediately {
		return true
	}
	quiet := time.NewTimer(r.options.Gather)
	defer quiet.Stop()
	most := time.NewTimer(time.Duration(mostGathers * float64(r.options.Gather)))
	defer most.Stop()
	for !r.isAwaited() {
		select {
		case <-r.wake:
			quiet.Reset(r.options.Gather)
			continue
		case <-quiet.C:
		case <-most.C:
		case <-ctx.Done():
		}
		break
	}
	return ctx.Err() == nil
}

func (r *Runner) isAwaited() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.waiting) > 0
}

// once runs the function for all requests so far, and answers their Syncs.
func (r *Runner) once(ctx context.Context) error {
	select {
	case <-r.wake:
	default:
	}
	r.mu.Lock()
	waiting := r.waiting
	r.waiting = nil
	r.mu.Unlock()
	err := ErrEnded // stays if the function ends this goroutine (runtime.Goexit)
	defer func() {
		for _, done := range waiting {
			done <- err
		}
	}()
	err = r.call(ctx)
	return err
}

// call returns a panic of the function as an error, so that the run is retried.
func (r *Runner) call(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return r.run(ctx)
}

// bucket is a token bucket: a run takes a token, and the bucket gains one per interval
// while no run is active. It measures tokens in time. Owned by the goroutine of Run.
type bucket struct {
	interval time.Duration // one token
	capacity time.Duration
	tokens   time.Duration // at since
	since    time.Time
}

func newBucket(interval time.Duration, burst int) *bucket {
	interval = max(interval, 0) // Unlimited
	capacity := interval * time.Duration(burst)
	return &bucket{interval: interval, capacity: capacity, tokens: capacity, since: time.Now()}
}

// wait waits for a token, and reports false if ctx ends.
func (b *bucket) wait(ctx context.Context) bool {
	missing := b.interval - b.level(time.Now())
	if missing <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(missing)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

func (b *bucket) level(now time.Time) time.Duration {
	return min(b.tokens+now.Sub(b.since), b.capacity)
}

// take takes a token for a run. Call refillFrom when the run has ended.
func (b *bucket) take() { b.tokens = b.level(time.Now()) - b.interval }

func (b *bucket) refillFrom(now time.Time) { b.since = now }

// backoff computes the pauses between consecutive failures.
type backoff struct {
	Backoff
	pause time.Duration
}

func (b *backoff) reset() { b.pause = 0 }

func (b *backoff) next() time.Duration {
	if b.pause == 0 {
		b.pause = b.Initial
	} else {
		// The product may overflow a Duration, Max cannot.
		b.pause = time.Duration(min(float64(b.pause)*b.Factor, float64(b.Max)))
	}
	jitter := max(b.Jitter, 0) // NoJitter
	return b.pause + time.Duration(rand.Float64()*jitter*float64(b.pause))
}
