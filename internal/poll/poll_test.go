package poll

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// recording is a testing.TB that only records its failure.
type recording struct {
	testing.TB

	failed bool
}

func (r *recording) Helper()               {}
func (r *recording) Fatalf(string, ...any) { r.failed = true }

func TestConditionsArePolledForAMinute(t *testing.T) {
	for name, c := range map[string]struct {
		after time.Duration // when the condition begins to hold
		want  bool
	}{
		"at once":  {0, true},
		"later":    {50 * time.Second, true},
		"too late": {2 * time.Minute, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				holds := func() bool { return time.Since(start) >= c.after }
				if got := Soon(holds); got != c.want {
					t.Errorf("Soon = %t, want %t", got, c.want)
				}
				if late := time.Since(start) - min(c.after, Timeout); late > longestPause {
					t.Errorf("it took %v longer than the condition, want %v at most", late, longestPause)
				}
				var until, none recording
				start = time.Now()
				Until(&until, "it", holds)
				start = time.Now()
				Nil(&none, "it", func() error {
					if holds() {
						return nil
					}
					return errors.New("not yet")
				})
				if until.failed == c.want || none.failed == c.want {
					t.Errorf("Until fails: %t, Nil fails: %t, want %t", until.failed, none.failed, !c.want)
				}
			})
		})
	}
}
