package proxier

import (
	"errors"
	"time"
)

// watchState is the state of the Watch of a family's engine.
type watchState struct {
	// err is the last failure; nil before the first one. since is when it began to fail.
	err   error
	since time.Time
	// running is when the running Watch was called; zero while none runs.
	running time.Time
}

func (w *watchState) started(now time.Time) { w.running = now }

func (w *watchState) failed(err error, now time.Time) {
	if err == nil {
		err = errors.New("the watch ended")
	}
	if w.works(now) {
		w.since = now
	}
	w.err, w.running = err, time.Time{}
}

// works reports whether there was no failure, or Watch runs again for a while.
func (w *watchState) works(now time.Time) bool {
	return w.err == nil || !w.running.IsZero() && now.Sub(w.running) > firstPause
}

func (w *watchState) condition(now time.Time) (c Condition, lasts bool) {
	if w.works(now) {
		return Condition{}, false
	}
	return Condition{Type: ConditionUnwatched, Since: w.since, Message: w.err.Error()}, true
}
