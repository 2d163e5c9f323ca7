package runner

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// traffic is a Runner with random requests, and a log of its runs.
type traffic struct {
	*rand.Rand
	options Options
	mu      sync.Mutex
	runs    []span
	asked   []time.Time
}

type span struct{ start, end time.Time }

// run takes a random time, and fails at random.
func (l *traffic) run(context.Context) (next time.Time, err error) {
	l.mu.Lock()
	lasts, fails := time.Duration(l.Int64N(2_000))*time.Millisecond, l.IntN(3) == 0
	l.mu.Unlock()
	start := time.Now()
	time.Sleep(lasts)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runs = append(l.runs, span{start, time.Now()})
	if fails {
		return time.Time{}, errors.New("broken")
	}
	return time.Time{}, nil
}

func (l *traffic) ask(r *Runner) {
	l.mu.Lock()
	pause := time.Duration(l.Int64N(3_000)) * time.Millisecond * time.Duration(l.IntN(2))
	l.mu.Unlock()
	time.Sleep(pause)
	l.mu.Lock()
	l.asked = append(l.asked, time.Now())
	l.mu.Unlock()
	r.Trigger()
}

// TestRandomRequestsKeepTheLimitsAndNoneIsLost checks RUN-02, RUN-04, RUN-07 and RUN-10 with
// requests at any time, runs of any length, failures and retries.
func TestRandomRequestsKeepTheLimitsAndNoneIsLost(t *testing.T) {
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			l := &traffic{Rand: rand.New(rand.NewPCG(seed, 0))}
			l.options = Options{MinInterval: time.Second, Burst: 1 + l.IntN(4)}
			r, err := New(l.options, l.run)
			if err != nil {
				t.Fatalf("New: %v", err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- r.Run(ctx) }()
			for range 100 {
				l.ask(r)
			}
			time.Sleep(time.Minute) // for the run of the last request
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run = %v", err)
			}
			l.checkRate(t, seed)
			l.checkNoneLost(t, seed)
		})
	}
}

// checkRate: between a run and the one Burst later the bucket has gained a token, while no
// run was active.
func (l *traffic) checkRate(t *testing.T, seed uint64) {
	t.Helper()
	for i := range l.runs[1:] {
		if l.runs[i+1].start.Before(l.runs[i].end) {
			t.Fatalf("seed %d: run %d starts before run %d has ended", seed, i+1, i)
		}
	}
	for i := range l.runs[l.options.Burst:] {
		var idle time.Duration
		for j := i; j < i+l.options.Burst; j++ {
			idle += l.runs[j+1].start.Sub(l.runs[j].end)
		}
		if idle < l.options.MinInterval {
			t.Fatalf("seed %d: %d runs from run %d on with pauses of %v in total, want at least %v",
				seed, l.options.Burst+1, i, idle, l.options.MinInterval)
		}
	}
}

// checkNoneLost: the run for a request starts at most MinInterval after it, or after the end
// of the run that was active then.
func (l *traffic) checkNoneLost(t *testing.T, seed uint64) {
	t.Helper()
	for n, asked := range l.asked {
		free := asked
		var answer *span
		for i := range l.runs {
			if run := &l.runs[i]; !run.start.Before(asked) {
				answer = run
				break
			} else if run.end.After(asked) {
				free = run.end
			}
		}
		if answer == nil || answer.start.Sub(free) > l.options.MinInterval {
			t.Fatalf("seed %d: request %d at %v has no run within %v of %v: %v", seed, n, asked, l.options.MinInterval, free, answer)
		}
	}
}

// TestEveryOfManySyncsIsAnswered: with the race detector it also shows that the methods may
// be called from several goroutines.
func TestEveryOfManySyncsIsAnswered(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b *bench) {
		b.lasts(10 * time.Millisecond)
		var callers sync.WaitGroup
		for n := range 50 {
			callers.Go(func() {
				for range 20 {
					time.Sleep(time.Duration(n) * time.Millisecond)
					b.Trigger()
					if err := b.Sync(t.Context()); err != nil {
						t.Errorf("Sync = %v", err)
					}
				}
			})
		}
		callers.Wait()
	})
}
