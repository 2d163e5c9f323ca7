package runner

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bench is a Runner in a synctest bubble, with the runs of its function.
type bench struct {
	*Runner
	runs    atomic.Int32
	takes   atomic.Int64                        // nanoseconds of each run
	wish    atomic.Int64                        // after so many it wants to run again; 0: it does not
	left    atomic.Int32                        // so many runs are parts that want to go on
	outcome atomic.Pointer[func(run int) error] // of the nth run, from 1
	start   time.Time
	stop    func()
}

func (b *bench) run(context.Context) (next time.Time, err error) {
	n := b.runs.Add(1)
	time.Sleep(time.Duration(b.takes.Load()))
	if outcome := b.outcome.Load(); outcome != nil {
		err = (*outcome)(int(n))
	}
	if wish := b.wish.Load(); wish != 0 {
		next = time.Now().Add(time.Duration(wish))
	}
	if b.left.Add(-1) >= 0 {
		next = AtOnce()
	}
	return next, err
}

func (b *bench) ends(outcome func(run int) error) { b.outcome.Store(&outcome) }

func (b *bench) lasts(d time.Duration) { b.takes.Store(int64(d)) }

// inBubble calls test with a running Runner.
func inBubble(t *testing.T, options Options, test func(t *testing.T, b *bench)) {
	t.Helper()
	options.Gather = cmp.Or(options.Gather, Immediately)
	synctest.Test(t, func(t *testing.T) {
		b := &bench{start: time.Now()}
		r, err := New(options, b.run)
		if err != nil {
			t.Fatalf("New: %v", err)
		}
		b.Runner = r
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		stopped := false
		b.stop = func() {
			if stopped {
				return
			}
			stopped = true
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run = %v, want nil when ctx ends", err)
			}
		}
		defer b.stop()
		synctest.Wait()
		test(t, b)
	})
}

// at waits until the given time after the start, and checks the number of runs.
func (b *bench) at(t *testing.T, when time.Duration, wantRuns int) {
	t.Helper()
	time.Sleep(when - time.Since(b.start))
	synctest.Wait()
	if got := int(b.runs.Load()); got != wantRuns {
		t.Errorf("after %v: %d runs, want %d", when, got, wantRuns)
	}
}

// TestABurstIsOneRun: requests that follow each other soon are one run, which waits for the end of the burst, but
// not without end. A Sync waits for nothing.
func TestABurstIsOneRun(t *testing.T) {
	inBubble(t, Options{Gather: 2 * time.Millisecond}, func(t *testing.T, b *bench) {
		b.Trigger()
		b.at(t, 1999*time.Microsecond, 0)
		b.at(t, 2*time.Millisecond, 1)
		time.Sleep(time.Second)
		began := time.Since(b.start)
		b.Trigger()
		b.at(t, began+1500*time.Microsecond, 1)
		b.Trigger()
		b.at(t, began+3*time.Millisecond, 1)
		b.at(t, began+3500*time.Microsecond, 2)
		time.Sleep(time.Second)
		began = time.Since(b.start)
		for range 5 {
			b.Trigger()
			time.Sleep(1500 * time.Microsecond)
		}
		b.at(t, began+7500*time.Microsecond, 3) // since 5 ms
		b.at(t, began+8500*time.Microsecond, 4) // 2 ms after the last request
		time.Sleep(time.Second)
		began = time.Since(b.start)
		b.Trigger()
		b.at(t, began+time.Millisecond, 4)
		if err := b.Sync(t.Context()); err != nil || time.Since(b.start) != began+time.Millisecond {
			t.Errorf("Sync = %v after %v", err, time.Since(b.start)-began)
		}
	})
}

// TestPartsFollowEachOther: parts of a run neither gather nor wait for the rate limit, in which they count as one
// run. What comes meanwhile is gathered before the next part.
func TestPartsFollowEachOther(t *testing.T) {
	options := Options{MinInterval: time.Second, Burst: 1, Gather: 10 * time.Millisecond}
	inBubble(t, options, func(t *testing.T, b *bench) {
		b.lasts(30 * time.Millisecond)
		b.left.Store(24)
		b.Trigger()
		b.at(t, 39*time.Millisecond, 1)
		b.at(t, 41*time.Millisecond, 2)
		b.at(t, 729*time.Millisecond, 24)
		b.at(t, 731*time.Millisecond, 25)
		b.at(t, time.Hour-time.Second, 25) // the last part does not want to go on

		began := time.Since(b.start)
		b.left.Store(1)
		b.Trigger()
		b.at(t, began+20*time.Millisecond, 26)
		b.Trigger()                            // during the first part
		b.at(t, began+49*time.Millisecond, 26) // gathers since 40 ms
		b.at(t, began+51*time.Millisecond, 27)
		b.Trigger() // during the last part, which ends after 80 ms
		b.at(t, began+1079*time.Millisecond, 27)
		b.at(t, began+1081*time.Millisecond, 28)
	})
}

// TestPartsEndWithTheContext: a function that always wants to go on does not outlive the context.
func TestPartsEndWithTheContext(t *testing.T) {
	inBubble(t, second(), func(t *testing.T, b *bench) {
		b.lasts(time.Second)
		b.left.Store(1000)
		b.Trigger()
		b.at(t, 2500*time.Millisecond, 3)
		b.stop()
		b.at(t, time.Minute, 3)
	})
}

func second() Options { return Options{MinInterval: time.Second, Burst: 1, MaxInterval: time.Hour} }

// RUN-02, RUN-04, RUN-05.
func TestRequestsInTheCoolDownComeToOneRunAtItsEnd(t *testing.T) {
	inBubble(t, second(), func(t *testing.T, b *bench) {
		b.Trigger()
		b.at(t, 0, 1)
		for i := range 10 {
			b.Trigger()
			b.at(t, time.Duration(i)*50*time.Millisecond, 1)
		}
		b.at(t, 999*time.Millisecond, 1)
		b.at(t, time.Second, 2)
		b.at(t, time.Minute, 2)
	})
}

// RUN-04: the interval counts from the end of a run.
func TestTheIntervalBeginsWhenTheRunEnds(t *testing.T) {
	inBubble(t, second(), func(t *testing.T, b *bench) {
		b.lasts(5 * time.Second)
		b.Trigger()
		b.at(t, time.Second, 1)
		b.Trigger() // during the run: one more afterwards
		b.at(t, 5999*time.Millisecond, 1)
		b.at(t, 6*time.Second, 2)
		b.at(t, time.Minute, 2)
	})
}

// RUN-18: after a long run the interval is ten times as long as the run, parts included, and 50 ms at most.
func TestALongRunIsFollowedByALongerPause(t *testing.T) {
	for name, test := range map[string]struct {
		options     Options
		takes, want time.Duration
		parts       int
	}{
		"short":                  {takes: time.Millisecond, parts: 1, want: 10 * time.Millisecond},
		"longer":                 {takes: 3 * time.Millisecond, parts: 1, want: 30 * time.Millisecond},
		"two parts":              {takes: time.Millisecond, parts: 2, want: 20 * time.Millisecond},
		"long":                   {takes: time.Minute, parts: 1, want: 50 * time.Millisecond},
		"beside a long interval": {options: Options{MinInterval: time.Second}, takes: time.Minute, parts: 1, want: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			test.options.Burst = 1
			inBubble(t, test.options, func(t *testing.T, b *bench) {
				b.lasts(test.takes)
				b.left.Store(int32(test.parts - 1))
				b.Trigger()
				ended := time.Duration(test.parts) * test.takes
				b.at(t, ended, test.parts)
				b.lasts(0)
				b.Trigger()
				b.at(t, ended+test.want-1, test.parts)
				b.at(t, ended+test.want, test.parts+1)
				b.Trigger() // and after a short one
				b.at(t, ended+test.want+b.options.MinInterval, test.parts+2)
			})
		})
	}
}

// RUN-18: a longer interval leaves the bucket as full as it was.
func TestTheBurstStaysWhenTheIntervalGrows(t *testing.T) {
	inBubble(t, Options{Burst: 2}, func(t *testing.T, b *bench) {
		b.lasts(5 * time.Millisecond)
		b.Trigger()
		b.at(t, 5*time.Millisecond, 1)
		b.Trigger() // the second token
		b.at(t, 5*time.Millisecond, 2)
		b.Trigger()
		b.at(t, 60*time.Millisecond-1, 2)
		b.at(t, 60*time.Millisecond, 3)
	})
}

func TestAQuietTimeFillsNoMoreThanTheBurst(t *testing.T) {
	options := Options{MinInterval: time.Second, Burst: 3}
	inBubble(t, options, func(t *testing.T, b *bench) {
		const quiet = 59 * time.Minute
		b.at(t, quiet, 0)
		for n := 1; n <= 3; n++ {
			b.Trigger()
			b.at(t, quiet, n)
		}
		b.Trigger()
		b.at(t, quiet+time.Second-1, 3)
		b.at(t, quiet+time.Second, 4)
	})
}

func TestABurstNeedsNoWaiting(t *testing.T) {
	options := Options{MinInterval: time.Second, Burst: 3}
	inBubble(t, options, func(t *testing.T, b *bench) {
		for n := 1; n <= 3; n++ {
			b.Trigger()
			b.at(t, 0, n)
		}
		b.Trigger()
		b.at(t, 999*time.Millisecond, 3)
		b.at(t, time.Second, 4)
		b.at(t, 2500*time.Millisecond, 4) // the bucket has 1.5 tokens
		b.Trigger()
		b.at(t, 2500*time.Millisecond, 5)
		b.Trigger()
		b.at(t, 2999*time.Millisecond, 5)
		b.at(t, 3*time.Second, 6)
	})
}

// RUN-13.
func TestUnlimitedRunsFollowEachOther(t *testing.T) {
	inBubble(t, Options{MinInterval: Unlimited}, func(t *testing.T, b *bench) {
		for n := 1; n <= 100; n++ {
			b.Trigger()
			b.at(t, 0, n)
		}
		b.lasts(time.Minute)
		b.Trigger()
		b.at(t, time.Second, 101)
		b.Trigger()
		b.at(t, time.Minute, 102)
	})
}

// RUN-06, RUN-09.
func TestTheFunctionRunsOnceInAWhile(t *testing.T) {
	inBubble(t, second(), func(t *testing.T, b *bench) {
		b.lasts(time.Minute)
		b.at(t, time.Hour-1, 0)
		b.at(t, time.Hour, 1)
		b.at(t, 2*time.Hour+time.Minute-1, 1)
		b.at(t, 2*time.Hour+time.Minute, 2)
	})
}

func TestNeverRunsOnlyOnRequest(t *testing.T) {
	options := second()
	options.MaxInterval = Never
	inBubble(t, options, func(t *testing.T, b *bench) {
		b.at(t, 1000*time.Hour, 0)
		b.Trigger()
		b.at(t, 1000*time.Hour, 1)
	})
}

// RUN-06 with growing pauses.
func TestAFailureIsRetriedWithGrowingPauses(t *testing.T) {
	options := Options{
		MinInterval: Unlimited,
		Retry:       Backoff{Initial: time.Second, Max: 5 * time.Second, Factor: 2, Jitter: NoJitter},
	}
	inBubble(t, options, func(t *testing.T, b *bench) {
		broken := errors.New("broken")
		b.ends(func(run int) error {
			if run == 6 {
				return nil
			}
			return broken
		})
		b.Trigger()
		for n, when := range []int{0, 1, 3, 7, 12, 17} { // pauses of 1, 2, 4, 5, 5 seconds
			if n > 0 {
				b.at(t, time.Duration(when)*time.Second-1, n)
			}
			b.at(t, time.Duration(when)*time.Second, n+1)
		}
		b.at(t, time.Minute, 6) // success: no retry
		b.Trigger()
		b.at(t, time.Minute, 7)
		b.at(t, time.Minute+time.Second, 8) // and the pauses begin anew
	})
}

// RUN-07.
func TestARequestDoesNotWaitForTheRetry(t *testing.T) {
	options := second()
	options.Retry = Backoff{Initial: time.Minute, Max: time.Minute, Jitter: NoJitter}
	inBubble(t, options, func(t *testing.T, b *bench) {
		b.ends(func(run int) error {
			if run == 1 {
				return errors.New("broken")
			}
			return nil
		})
		b.Trigger()
		b.at(t, 0, 1)
		b.Trigger()
		b.at(t, time.Second, 2)
		b.at(t, 10*time.Minute, 2) // the success cancelled the retry
	})
}

// RUN-06: the shorter of the two pauses applies.
func TestARetryWaitsNoLongerThanMaxInterval(t *testing.T) {
	for name, test := range map[string]struct{ maxInterval, want time.Duration }{
		"shorter than the pause": {time.Minute, time.Minute},
		"longer than the pause":  {time.Hour, 10 * time.Minute},
		"Never":                  {Never, 10 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			options := second()
			options.MaxInterval = test.maxInterval
			options.Retry = Backoff{Initial: 10 * time.Minute, Jitter: NoJitter}
			inBubble(t, options, func(t *testing.T, b *bench) {
				b.ends(func(int) error { return errors.New("broken") })
				b.Trigger()
				b.at(t, test.want-1, 1)
				b.at(t, test.want, 2)
			})
		})
	}
}

// The function decides when it runs again: before MaxInterval, and instead of Retry.
func TestTheFunctionSaysWhenItRunsAgain(t *testing.T) {
	options := Options{MinInterval: Unlimited, MaxInterval: time.Hour, Retry: Backoff{Initial: time.Minute, Jitter: NoJitter}}
	inBubble(t, options, func(t *testing.T, b *bench) {
		b.wish.Store(int64(10 * time.Second))
		b.ends(func(run int) error {
			if run == 2 {
				return errors.New("broken")
			}
			return nil
		})
		b.Trigger()
		b.at(t, 10*time.Second-1, 1)
		b.at(t, 10*time.Second, 2)
		b.at(t, 20*time.Second, 3) // not a minute later
		b.Trigger()
		b.at(t, 21*time.Second, 4)
		b.at(t, 29*time.Second, 4)
		b.wish.Store(int64(2 * time.Hour))
		b.at(t, 30*time.Second, 5)
		b.at(t, 30*time.Second+time.Hour, 6)
		b.wish.Store(-1) // at once
		b.at(t, 29*time.Minute+time.Hour, 6)
	})
}

// RUN-08.
func TestARetryObeysTheRateLimit(t *testing.T) {
	options := second()
	options.Retry = Backoff{Initial: time.Millisecond, Max: time.Millisecond, Jitter: NoJitter}
	inBubble(t, options, func(t *testing.T, b *bench) {
		b.ends(func(int) error { return errors.New("broken") })
		b.Trigger()
		b.at(t, 999*time.Millisecond, 1)
		b.at(t, 10*time.Second, 11)
	})
}

// RUN-11, without W-13.
func TestAPanicIsAnErrorAndIsRetried(t *testing.T) {
	options := Options{MinInterval: Unlimited, Retry: Backoff{Initial: time.Second, Jitter: NoJitter}}
	inBubble(t, options, func(t *testing.T, b *bench) {
		b.ends(func(run int) error {
			if run == 1 {
				panic("ouch")
			}
			return nil
		})
		err := b.Sync(t.Context())
		if err == nil || !strings.Contains(err.Error(), "ouch") || !strings.Contains(err.Error(), "runner_test.go") {
			t.Errorf("Sync = %v, want the panic with its stack", err)
		}
		b.at(t, time.Second, 2)
	})
}

// RUN-03.
func TestARequestBeforeRunIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bench{start: time.Now()}
		r, err := New(second(), b.run)
		if err != nil {
			t.Fatal(err)
		}
		r.Trigger()
		r.Trigger()
		synced := make(chan error, 1)
		go func() { synced <- r.Sync(t.Context()) }()
		time.Sleep(time.Minute)
		if n := b.runs.Load(); n != 0 {
			t.Fatalf("%d runs without Run", n)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		synctest.Wait()
		if n := b.runs.Load(); n != 1 {
			t.Errorf("%d runs for requests before Run, want 1", n)
		}
		if err := <-synced; err != nil {
			t.Errorf("Sync = %v", err)
		}
		if err := r.Run(ctx); err == nil {
			t.Error("a second Run returned no error")
		}
		cancel()
		<-done
	})
}

// RUN-12, without W-14.
func TestAfterTheEndNothingHappens(t *testing.T) {
	inBubble(t, second(), func(t *testing.T, b *bench) {
		b.Trigger()
		b.at(t, 0, 1)
		b.Trigger() // waits for the cool-down
		waiting := make(chan error, 1)
		go func() { waiting <- b.Sync(t.Context()) }()
		synctest.Wait()
		b.stop()
		if took := time.Since(b.start); took != 0 {
			t.Errorf("Run returned %v after ctx ended, want at once", took)
		}
		if err := <-waiting; !errors.Is(err, ErrEnded) {
			t.Errorf("a waiting Sync = %v, want ErrEnded", err)
		}
		b.Trigger()
		b.Trigger()
		if err := b.Sync(t.Context()); !errors.Is(err, ErrEnded) {
			t.Errorf("Sync after the end = %v, want ErrEnded", err)
		}
		b.at(t, time.Minute, 1)
	})
}

func TestTheFunctionGetsTheContextOfRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		var got context.Context
		r, err := New(Options{}, func(ctx context.Context) (time.Time, error) {
			got = ctx
			<-ctx.Done()
			return time.Time{}, ctx.Err()
		})
		if err != nil {
			t.Fatalf("New: %v", err)
		}
		r.Trigger()
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "mine"), time.Second)
		defer cancel()
		if err := r.Run(ctx); err != nil {
			t.Errorf("Run = %v, want nil: the end of ctx is no error", err)
		}
		if got == nil || got.Value(key{}) != "mine" {
			t.Errorf("the function got %v, want the context of Run", got)
		}
	})
}

// TestAFunctionThatEndsItsGoroutineLeavesNobodyWaiting: FailNow of a test ends its goroutine.
func TestAFunctionThatEndsItsGoroutineLeavesNobodyWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, err := New(Options{}, func(context.Context) (time.Time, error) {
			runtime.Goexit()
			return time.Time{}, nil
		})
		if err != nil {
			t.Fatalf("New: %v", err)
		}
		go func() { _ = r.Run(t.Context()) }()
		for range 2 { // the run that ends, and after the end
			if err := r.Sync(t.Context()); !errors.Is(err, ErrEnded) {
				t.Errorf("Sync = %v, want ErrEnded", err)
			}
		}
	})
}

func TestRunWaitsForTheFunction(t *testing.T) {
	inBubble(t, second(), func(t *testing.T, b *bench) {
		b.lasts(10 * time.Second)
		b.Trigger()
		b.at(t, time.Second, 1)
		b.stop()
		if took := time.Since(b.start); took != 10*time.Second {
			t.Errorf("Run returned after %v, want 10s", took)
		}
	})
}

// TestSyncWaitsForARunThatStartsAfterIt: a run that has already started may not include the
// caller's changes.
func TestSyncWaitsForARunThatStartsAfterIt(t *testing.T) {
	inBubble(t, second(), func(t *testing.T, b *bench) {
		b.lasts(5 * time.Second)
		second := errors.New("of the second run")
		b.ends(func(run int) error {
			if run == 2 {
				return second
			}
			return nil
		})
		b.Trigger()
		b.at(t, time.Second, 1)
		if err := b.Sync(t.Context()); !errors.Is(err, second) {
			t.Errorf("Sync = %v, want the error of the second run", err)
		}
		if took := time.Since(b.start); took != 11*time.Second {
			t.Errorf("Sync returned after %v, want 11s: run, interval, run", took)
		}
	})
}

func TestSyncGivesUpWithItsContext(t *testing.T) {
	inBubble(t, second(), func(t *testing.T, b *bench) {
		b.lasts(time.Hour)
		b.Trigger()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := b.Sync(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Sync = %v, want deadline exceeded", err)
		}
	})
}
