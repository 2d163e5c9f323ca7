// Package poll waits in tests until a condition holds, for example one of the kernel, a
// process or a goroutine. It also runs what a test needs beside it.
package poll

import (
	"testing"
	"time"
)

// Timeout is the longest wait, sufficient on a busy machine.
const Timeout = time.Minute

// The pauses between two checks grow, so that the test reacts fast to a quick condition
// and leaves the processor free during a slow one.
const firstPause, longestPause = time.Millisecond, 50 * time.Millisecond

// Soon waits for a condition, and returns whether it held within Timeout.
func Soon(holds func() bool) bool { return Within(Timeout, holds) }

// Within is Soon with a timeout.
func Within(timeout time.Duration, holds func() bool) bool {
	pause := firstPause
	for deadline := time.Now().Add(timeout); !holds(); pause = min(2*pause, longestPause) {
		if time.Now().After(deadline) {
			return false
		}
		<-time.After(pause)
	}
	return true
}

// Until waits for a condition. If it does not hold within Timeout, the test fails with
// the description what.
func Until(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	if !Soon(holds) {
		tb.Fatalf("%s: not within %v", what, Timeout)
	}
}

// Nil waits until check returns nil. If it does not within Timeout, the test fails with
// the description what and the last error.
func Nil(tb testing.TB, what string, check func() error) {
	tb.Helper()
	var err error
	if !Soon(func() bool { err = check(); return err == nil }) {
		tb.Fatalf("%s: not within %v: %v", what, Timeout, err)
	}
}
