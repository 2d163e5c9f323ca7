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
	wake    chan struct{} // holds one request
	ended   chan struct{} // closed when Run has ended

	mu      sync.Mutex // guards all below
	started bool
	waiting []chan error // Syncs that wait for a run to start after them
}

// New returns a Runner of run. It starts nothing.
func New(options Options, run func(context.Context) error) (*Runner, error) {
	options = options.WithDefaults()
	err := options.Validate()
	if run == nil {
		err = errors.Join(err, errors.New("no function to run"))
	}
	if err != nil {
		return nil, err
	}
	return &Runner{options: options, run: run, wake: make(chan struct{}, 1), ended: make(chan struct{})}, nil
}

// Trigger asks for a run, soon. Requests before the run starts come to one. It
// never blocks, is kept for Run if called before, and does nothing after it.
func (r *Runner) Trigger() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Sync asks for a run and waits for one that starts after the call, and returns
// its error. It returns ErrEnded when Run ends first, and the context's error
// when that ends first. Before Run is called it waits. The function itself must
// not call it: it would wait for the run after its own.
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
		return r.answered(done)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// answered is the answer of the last run, if it was one's own.
func (r *Runner) answered(done <-chan error) error {
	select {
	case err := <-done:
		return err
	default:
		return ErrEnded
	}
}

// Done is closed when Run has ended, and never if it is not called.
func (r *Runner) Done() <-chan struct{} { return r.ended }

// Run calls the function when it is due, until ctx ends; it returns nil after the
// last call has returned. The function gets ctx. It may be called once; a second
// call returns an error.
func (r *Runner) Run(ctx context.Context) error {
	if err := r.begin(); err != nil {
		return err
	}
	defer close(r.ended)
	limit := newBucket(r.options.MinInterval, r.options.Burst)
	retry := backoff{Backoff: r.options.Retry}
	pause := r.options.MaxInterval
	for r.due(ctx, pause) && limit.wait(ctx) {
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
		return errors.New("runner was run before")
	}
	r.started = true
	return nil
}

// due waits for a request or for the end of the pause. It returns false when ctx
// ends.
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

// once runs the function for all requests so far.
func (r *Runner) once(ctx context.Context) error {
	select {
	case <-r.wake:
	default:
	}
	r.mu.Lock()
	waiting := r.waiting
	r.waiting = nil
	r.mu.Unlock()
	err := ErrEnded // holds if the function ends this goroutine (runtime.Goexit)
	defer func() {
		for _, done := range waiting {
			done <- err
		}
	}()
	err = r.call(ctx)
	return err
}

// call turns a panic of the function into an error, so that it is retried.
func (r *Runner) call(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return r.run(ctx)
}

// bucket is a token bucket: a run takes a token, and one grows back per interval
// while no run is under way. Owned by the goroutine of Run.
type bucket struct {
	interval time.Duration
	burst    time.Duration // a full bucket, as the time that it takes to fill
	stock    time.Duration // what was in the bucket at since
	since    time.Time
}

func newBucket(interval time.Duration, burst int) *bucket {
	interval = max(interval, 0) // Unlimited
	full := interval * time.Duration(burst)
	return &bucket{interval: interval, burst: full, stock: full, since: time.Now()}
}

// wait returns when there is a token, true unless ctx ended.
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
	return min(b.stock+now.Sub(b.since), b.burst)
}

// take begins a run, in which nothing grows back: refillFrom follows its end.
func (b *bucket) take() { b.stock = b.level(time.Now()) - b.interval }

func (b *bucket) refillFrom(now time.Time) { b.since = now }

// backoff counts failures in a row.
type backoff struct {
	Backoff
	pause time.Duration
}

func (b *backoff) reset() { b.pause = 0 }

func (b *backoff) next() time.Duration {
	if b.pause == 0 {
		b.pause = b.Initial
	} else {
		// The product may be too large for a Duration, Max is not.
		b.pause = time.Duration(min(float64(b.pause)*b.Factor, float64(b.Max)))
	}
	jitter := max(b.Jitter, 0) // NoJitter
	return b.pause + time.Duration(rand.Float64()*jitter*float64(b.pause))
}
