package history

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"
)

// seedVariable and seedsVariable are environment variables: the one seed that tests of
// histories run, and how many new ones they run instead of few.
const (
	seedVariable  = "SERVICEPLANE_HISTORY_SEED"
	seedsVariable = "SERVICEPLANE_HISTORY_SEEDS"
)

// Planes returns two empty planes that end with the test: see Run.
type Planes func(t *testing.T, seed uint64) (plane, fresh Plane)

// stepsPerHistory is the number of random steps of a history.
const stepsPerHistory = 30

// Test runs histories of new seeds, as many workers at a time. If one fails, Test shortens it and prints what is left.
func Test(t *testing.T, few, workers int, planes Planes) {
	t.Helper()
	first, count := Seeds(t, few)
	next := make(chan uint64)
	var running sync.WaitGroup
	for range min(workers, count) {
		running.Go(func() {
			for seed := range next {
				testSeed(t, seed, planes)
			}
		})
	}
	for i := range uint64(count) {
		if t.Failed() {
			break
		}
		next <- first + i
	}
	close(next)
	running.Wait()
}

// Seeds returns the seeds that a test of random histories runs: few new ones, or those that
// seedVariable and seedsVariable ask for. It prints how to run one again.
func Seeds(t *testing.T, few int) (first uint64, count int) {
	t.Helper()
	first, count = seeds(t, few)
	t.Logf("%d seeds from %d; to run one again: %s=N go test -run '%s'", count, first, seedVariable, t.Name())
	return first, count
}

func seeds(t *testing.T, few int) (first uint64, count int) {
	t.Helper()
	if text := os.Getenv(seedVariable); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("read %s: %v", seedVariable, err)
		}
		return seed, 1
	}
	if text := os.Getenv(seedsVariable); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("read %s: %v", seedsVariable, err)
		}
		few = n
	}
	return newSeed(), few
}

// few returns some, or all with seedsVariable.
func few(some, all int) int {
	if os.Getenv(seedsVariable) != "" {
		return all
	}
	return some
}

func newSeed() uint64 {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return uint64(binary.NativeEndian.Uint32(b[:]))
}

// patience is how long a kernel may take to become right on a busy machine, and
// shortPatience is enough while a history that has failed is shortened.
const patience, shortPatience = time.Minute, 8 * time.Second

func testSeed(t *testing.T, seed uint64, planes Planes) {
	t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
		steps := New(seed, stepsPerHistory)
		run := func(ctx context.Context, steps []Event, patience time.Duration) error {
			plane, fresh := planes(t, seed) // new ones: a failed history may leave something
			return Run(ctx, plane, fresh, steps, patience)
		}
		err := run(t.Context(), steps, patience)
		if err == nil {
			return
		}
		t.Errorf("seed %d: %v", seed, err)
		short := shrink(t.Context(), steps, 2*time.Minute, func(ctx context.Context, steps []Event) bool {
			return run(ctx, steps, shortPatience) != nil
		})
		t.Logf("%d steps, shortened to %d:\n%s", len(steps), len(short), text(short))
		t.Logf("its error: %v", run(t.Context(), short, shortPatience))
	})
}
