package proportion

import (
	"runtime"
	"runtime/debug"
	"syscall"
	"testing"
	"time"
)

const (
	// factor is how many times larger the large work is. Work in proportion takes 8 times as
	// long, or 10 times with the logarithm of sorting; quadratic work takes 64 times as long.
	factor = 8
	most   = 4 * factor
	// clock is the minimum that a time counts as, because the kernel counts in ticks.
	clock = 5 * time.Millisecond
	// rounds is how often both sizes are measured at most: other programs may disturb.
	rounds = 12
)

// Check fails the test if work of 8 times a size takes much more than 8 times the CPU time.
// prepare sets up work of size n and returns it. The garbage collector is off.
func Check(t *testing.T, size int, prepare func(n int) (work func())) {
	t.Helper()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	var little, much time.Duration
	for range rounds {
		little, much = measure(t, size, prepare), measure(t, factor*size, prepare) // another program slows both of a round
		if much <= most*max(little, clock) {
			return
		}
	}
	t.Errorf("size %d takes %v, %d times as much takes %v, want %d times the time at most", size, little, factor, much, most)
}

func measure(t *testing.T, size int, prepare func(n int) (work func())) time.Duration {
	t.Helper()
	work := prepare(size)
	runtime.GC()
	start := cpuTime(t)
	work()
	return cpuTime(t) - start
}

// cpuTime returns the user time of the process, so other programs do not count.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		t.Fatal(err)
	}
	return time.Duration(used.Utime.Nano())
}
