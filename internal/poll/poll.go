// Package poll waits in tests until a condition of the kernel, of a process or of a
// goroutine holds.
package poll

import (
	"testing"
	"time"
)

// Timeout is how long anything may take on a busy machine.
const Timeout = time.Minute

// Pauses between two looks grow, so that a quick condition is seen at once and a slow
// one leaves the processor to what it waits for.
const firstPause, longestPause = time.Millisecond, 50 * time.Millisecond

// Soon says whether a condition holds within Timeout.
func Soon(holds func() bool) bool {
	pause := firstPause
	for deadline := time.Now().Add(Timeout); !holds(); pause = min(2*pause, longestPause) {
		if time.Now().After(deadline) {
			return false
		}
		<-time.After(pause)
	}
	return true
}

// Until returns as soon as a condition holds. If it does not within Timeout, the test
// ends with what it waited for.
func Until(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	if !Soon(holds) {
		tb.Fatalf("%s: not within %v", what, Timeout)
	}
}

// Nil returns as soon as check does without an error. If that is not within Timeout,
// the test ends with what it waited for and the last error.
func Nil(tb testing.TB, what string, check func() error) {
	tb.Helper()
	var err error
	if !Soon(func() bool { err = check(); return err == nil }) {
		tb.Fatalf("%s: not within %v: %v", what, Timeout, err)
	}
}
