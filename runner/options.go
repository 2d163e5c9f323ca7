package runner

import (
	"errors"
	"time"
)

// Options says how often a Runner runs its function. Zero fields take the
// defaults.
type Options struct {
	// MinInterval is the time in which the right to one more run grows back,
	// counted from the end of a run. 0 means 50ms; Unlimited means none.
	MinInterval time.Duration
	// Burst is how many runs may follow each other without waiting, after a
	// quiet time of Burst × MinInterval. 0 means 2.
	Burst int
	// MaxInterval is how long after the end of a run the next one starts even if
	// nobody asks. 0 means 1h; Never means never.
	MaxInterval time.Duration
	// Retry says when a failed run is repeated.
	Retry Backoff
}

// Backoff spaces the retries of a failing run: Initial, Initial × Factor, and so
// on up to Max, each made longer by a random part of up to Jitter.
type Backoff struct {
	// Initial is the pause after the first failure. 0 means 100ms.
	Initial time.Duration
	// Max bounds the pause, before jitter. 0 means 30s.
	Max time.Duration
	// Factor is what the pause grows by. 0 means 2.
	Factor float64
	// Jitter is the largest random part that is added, as a share of the pause:
	// 0 means 0.2, NoJitter means none.
	Jitter float64
}

// Named values for "off".
const (
	// Unlimited as MinInterval starts a run as soon as the last one ended.
	Unlimited time.Duration = -1
	// Never as MaxInterval runs only on request.
	Never time.Duration = -1
	// NoJitter as Backoff.Jitter makes retries exact.
	NoJitter float64 = -1
)

// ErrEnded is returned by Sync when Run has ended, or ends while Sync waits.
var ErrEnded = errors.New("runner has ended")
