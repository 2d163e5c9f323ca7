package healthcheck

import (
	"cmp"
	"sync"
	"time"
)

// failureKind says how long a failure lasts if nothing more is heard.
type failureKind int

const (
	// serverDown lasts until the server works.
	serverDown failureKind = iota
	// acceptFails is over when it is not repeated: the client may have left, and then
	// nothing is accepted although it could be.
	acceptFails
)

// acceptMemory is longer than http.Server waits between attempts, at most 1s.
const acceptMemory = 2 * time.Second

// failureState remembers what is wrong, and since when. The zero value is that all
// is well.
type failureState struct {
	mu    sync.Mutex // guards all below
	err   error
	kind  failureKind
	since time.Time
	last  time.Time
}

// set reports whether the failure is another one than before.
func (f *failureState) set(err error, kind failureKind, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	isNew := f.err == nil || f.err.Error() != err.Error()
	if f.err == nil || f.overLocked(now) {
		f.since = now
	}
	f.err, f.kind, f.last = err, kind, now
	return isNew
}

// clear reports whether there was a failure.
func (f *failureState) clear() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	was := f.err != nil
	f.err = nil
	return was
}

// current returns since when what is wrong, or nil.
func (f *failureState) current(now time.Time) (since time.Time, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil || f.overLocked(now) {
		return time.Time{}, nil
	}
	return f.since, f.err
}

func (f *failureState) overLocked(now time.Time) bool {
	return f.kind == acceptFails && now.Sub(f.last) > acceptMemory
}

// backoff spaces attempts: first, twice that, and so on up to longest.
type backoff struct {
	first, longest time.Duration
	pause          time.Duration
}

func (b *backoff) reset() { b.pause = 0 }

func (b *backoff) next() time.Duration {
	first := cmp.Or(b.first, bindRetry)
	b.pause = min(max(2*b.pause, first), max(first, b.longest))
	return b.pause
}
