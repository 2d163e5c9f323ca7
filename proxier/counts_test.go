package proxier_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// countingEngine counts the readings: that is its number of connections. A reading takes a second.
type countingEngine struct {
	fakeEngine

	readings uint64
	err      error
}

func (e *countingEngine) Abilities() proxier.Abilities {
	return proxier.Abilities{Counts: e.Counts}
}

func (e *countingEngine) Counts(ctx context.Context) (connection.Counts, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.readings++
	select {
	case <-time.After(time.Second):
		return connection.Counts{ServicePorts: []connection.ServicePortCounts{{Connections: e.readings}}}, e.err
	case <-ctx.Done():
		return connection.Counts{}, ctx.Err()
	}
}

// TestConcurrentReadersShareAReading: those who come while one runs share the next, which sees
// all that happened before they came. Nobody waits longer than two readings.
func TestConcurrentReadersShareAReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &countingEngine{}
		p := newProxier(t, proxier.Deps{}, e)
		var running sync.WaitGroup
		read := func(after time.Duration, ctx context.Context, reading uint64, took time.Duration, want error) {
			running.Go(func() {
				time.Sleep(after)
				began := time.Now()
				got, err := p.Counts(ctx, v1.IPv4Protocol)
				if d := time.Since(began); !errors.Is(err, want) || d != took {
					t.Errorf("after %v: error %v after %v, want %v after %v", after, err, d, want, took)
				}
				if want == nil && got.ServicePorts[0].Connections != reading {
					t.Errorf("after %v: reading %v, want %d", after, got, reading)
				}
			})
		}
		const ms = time.Millisecond
		read(0, t.Context(), 1, time.Second, nil)
		for range 5 {
			read(500*ms, t.Context(), 2, 1500*ms, nil)
			read(900*ms, t.Context(), 2, 1100*ms, nil)
		}
		read(5000*ms, t.Context(), 3, time.Second, nil)

		// Whoever reads gives up: another one reads for the rest.
		leaves, leave := context.WithTimeout(t.Context(), 10_200*ms)
		defer leave()
		read(10_000*ms, leaves, 0, 200*ms, context.DeadlineExceeded)
		read(10_100*ms, t.Context(), 5, 1100*ms, nil)
		read(10_150*ms, leaves, 0, 50*ms, context.DeadlineExceeded)
		running.Wait()

		e.err = errors.New("no kernel")
		read(0, t.Context(), 0, time.Second, e.err)
		running.Wait()
	})
}

func TestCountsNeedAnEngineThatCounts(t *testing.T) {
	p := newProxier(t, proxier.Deps{}, &fakeEngine{})
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		if _, err := p.Counts(t.Context(), family); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v, want ErrUnsupported", family, err)
		}
	}
}

// Counts are read again after a panic of an engine, which the caller survives as a server of metrics does.
func TestCountsAfterAPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		e := &countsEngine{counts: func() connection.Counts {
			if calls++; calls == 1 {
				panic("slice bounds out of range")
			}
			return connection.Counts{Connections: true}
		}}
		p := newProxier(t, proxier.Deps{}, e)
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the first reading does not panic")
				}
			}()
			_, _ = p.Counts(t.Context(), v1.IPv4Protocol)
		}()
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if counts, err := p.Counts(ctx, v1.IPv4Protocol); err != nil || !counts.Connections {
			t.Errorf("the second reading: %+v, %v", counts, err)
		}
	})
}

type countsEngine struct {
	fakeEngine
	counts func() connection.Counts
}

func (e *countsEngine) Abilities() proxier.Abilities {
	return proxier.Abilities{Counts: func(context.Context) (connection.Counts, error) { return e.counts(), nil }}
}
