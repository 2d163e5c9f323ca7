package runner

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"
)

// Runner calls a function within the limits of its Options. Its methods may be
// called from several goroutines at once.
type Runner struct {
	options Options
	run     func(context.Context) (next time.Time, err error)
	wake    chan struct{} // holds at most one request
	ended   chan struct{} // closed when Run has ended

	mu      sync.Mutex // guards all below
	started bool
	waiting []chan error // one for each Sync that waits for the next run
}

// New returns a Runner that calls run. It starts nothing.
//
// run returns when to call it again at the latest, or the zero time if only the Options decide; AtOnce if it
// has done a part of its work. If it returns an error without a time, Options.Retry decides.
func New(options Options, run func(context.Context) (next time.Time, err error)) (*Runner, error) {
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

// AtOnce is what the function returns if it has done a part of its work. The next part follows at once, and all parts
// count as one run in Options.MinInterval: between them, others can be served. If a request has come meanwhile,
// Options.Gather comes first.
func AtOnce() time.Time { return time.Unix(0, 0) }

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
	failures := 0
	pause, atOnce := r.options.MaxInterval, false
	for r.ready(ctx, pause, atOnce, limit) {
		next, err := r.once(ctx)
		now := time.Now()
		limit.ran(now)
		if failures++; err == nil {
			failures = 0
		}
		pause, atOnce = r.pause(next.Sub(now), !next.IsZero(), failures), next.Equal(AtOnce())
	}
	return nil
}

// ready waits for the next run, or for the next part of one. It reports false if ctx ends.
func (r *Runner) ready(ctx context.Context, pause time.Duration, atOnce bool, limit *bucket) bool {
	if atOnce {
		select {
		case <-r.wake: // what belongs together comes in several events
			return r.gather(ctx)
		default:
			return ctx.Err() == nil
		}
	}
	if !r.due(ctx, pause) || !r.gather(ctx) || !limit.wait(ctx) {
		return false
	}
	limit.take()
	return true
}

// pause returns how long to wait for a request, if the function wants to run again after a time, or has
// failed so often in a row.
func (r *Runner) pause(wanted time.Duration, isWanted bool, failures int) time.Duration {
	pause := max(wanted, 0)
	switch {
	case isWanted:
	case failures > 0:
		pause = r.options.Retry.Pause(failures)
	default:
		return r.options.MaxInterval
	}
	if most := r.options.MaxInterval; most != Never {
		pause = min(pause, most)
	}
	return pause
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
func (r *Runner) once(ctx context.Context) (next time.Time, err error) {
	select {
	case <-r.wake:
	default:
	}
	r.mu.Lock()
	waiting := r.waiting
	r.waiting = nil
	r.mu.Unlock()
	err = ErrEnded // stays if the function ends this goroutine (runtime.Goexit)
	defer func() {
		for _, done := range waiting {
			done <- err
		}
	}()
	next, err = r.call(ctx)
	return next, err
}

// call returns a panic of the function as an error, so that the run is retried.
func (r *Runner) call(ctx context.Context) (next time.Time, err error) {
	defer func() {
		if p := recover(); p != nil {
			next, err = time.Time{}, fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return r.run(ctx)
}

// bucket is a token bucket: a run takes a token, and the bucket gains one per interval
// while no run is active. It measures tokens in time. Owned by the goroutine of Run.
type bucket struct {
	least    time.Duration // the interval after a short run; 0: no limit
	interval time.Duration // one token, after the last run
	burst    time.Duration // how many tokens it holds
	tokens   time.Duration // at since
	since    time.Time
	began    time.Time // the run that is active, or was last
}

func newBucket(least time.Duration, burst int) *bucket {
	least = max(least, 0) // Unlimited
	return &bucket{least: least, interval: least, burst: time.Duration(burst), tokens: least * time.Duration(burst), since: time.Now()}
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
	return min(b.tokens+now.Sub(b.since), b.interval*b.burst)
}

// take takes a token for a run that begins. Call ran when the run, or a part of it, has ended.
func (b *bucket) take() {
	b.began = time.Now()
	b.tokens = b.level(b.began) - b.interval
}

// ran makes the interval fit the run. The bucket keeps as many tokens.
func (b *bucket) ran(now time.Time) {
	b.since = now
	if b.least == 0 {
		return
	}
	interval := max(b.least, min(restFactor*now.Sub(b.began), longestRest))
	b.tokens = time.Duration(float64(b.tokens) * (float64(interval) / float64(b.interval)))
	b.interval = interval
}

// Pause returns the pause after so many consecutive failures, at least 1. Zero fields do not count as
// their defaults: see Options.WithDefaults.
func (b *Backoff) Pause(failures int) time.Duration {
	// The product may overflow a Duration, Max cannot.
	pause := min(float64(b.Initial)*math.Pow(b.Factor, float64(failures-1)), float64(b.Max))
	return time.Duration(pause + rand.Float64()*max(b.Jitter, 0)*pause) // NoJitter is negative
}
