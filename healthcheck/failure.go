package healthcheck

import (
	"cmp"
	"sync"
	"time"
)

// failureKind decides how long a failure lasts.
type failureKind int

const (
	// serverDown lasts until the server listens.
	serverDown failureKind = iota
	// acceptFails ends after acceptFailureTTL unless it is repeated. When the client has
	// left, nothing is accepted any more that could show that accepting works again.
	acceptFails
)

// acceptFailureTTL is longer than http.Server waits between attempts, which is at most 1s.
const acceptFailureTTL = 2 * time.Second

// failureState holds the current failure and since when it lasts. The zero value means
// none.
type failureState struct {
	mu    sync.Mutex // guards all below
	err   error
	kind  failureKind
	since time.Time
	last  time.Time
}

// set reports whether the failure differs from the previous one.
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

// current returns the current failure and since when it lasts, or nil.
func (f *failureState) current(now time.Time) (since time.Time, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil || f.overLocked(now) {
		return time.Time{}, nil
	}
	return f.since, f.err
}

func (f *failureState) overLocked(now time.Time) bool {
	return f.kind == acceptFails && now.Sub(f.last) > acceptFailureTTL
}

// bindRetry is how soon a Server retries an address that is in use, as with kube-proxy.
const bindRetry = 5 * time.Second

// backoff doubles the pause between attempts, from first up to longest.
type backoff struct {
	first, longest time.Duration // 0 means bindRetry, and first
	pause          time.Duration
}

func (b *backoff) reset() { b.pause = 0 }

func (b *backoff) next() time.Duration {
	first := cmp.Or(b.first, bindRetry)
	b.pause = min(max(2*b.pause, first), max(first, b.longest))
	return b.pause
}
