package runner

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"time"
)

// Options limit how often a Runner runs its function. Zero fields mean the
// defaults.
type Options struct {
	// MinInterval is the time in which the token bucket gains one token, counted from the
	// end of a run. Up to 50ms, the time is longer after a longer run: ten times as long as the run. So short
	// runs follow each other soon, and longer ones leave time for all else. 0 means 10ms; Unlimited means no limit.
	MinInterval time.Duration
	// Gather is how long a run waits for further requests after each one, at most 2.5 times as long in all:
	// what belongs together comes in several events, such as an endpoint that moves from one slice to
	// another, and half of it may leave nothing that serves. Sync does not wait. 0 means 2ms, or Immediately if
	// MinInterval is Unlimited.
	Gather time.Duration
	// Burst is the size of the token bucket: how many runs may follow each other without
	// waiting, after an idle time of Burst intervals, which is at most 73 years. 0
	// means 2.
	Burst int
	// MaxInterval is the time from the end of a run to the next one without a request. 0
	// means 1h; Never means that runs need a request.
	MaxInterval time.Duration
	// Retry decides when a failed run is repeated, unless the function says it.
	Retry Backoff
}

// Backoff is the pause between the retries of a failing run: Initial, Initial × Factor, and
// so on up to Max, each with a random addition of up to Jitter.
type Backoff struct {
	// Initial is the pause after the first failure, at least 1ms. 0 means 100ms.
	Initial time.Duration
	// Max bounds the pause, before jitter. 0 means 30s, or Initial if that is
	// longer; at most 73 years.
	Max time.Duration
	// Factor multiplies the pause after each failure, at least 1. 0 means 2.
	Factor float64
	// Jitter is the largest random addition, as a share of the pause, at most 1. 0 means
	// 0.2, NoJitter means none.
	Jitter float64
}

// Named values for "off".
const (
	// Unlimited is a MinInterval that allows a run as soon as the previous one has ended.
	Unlimited time.Duration = -1
	// Immediately is a Gather that waits for nothing.
	Immediately time.Duration = -1
	// Never is a MaxInterval with which runs need a request.
	Never time.Duration = -1
	// NoJitter is a Backoff.Jitter that adds nothing to pauses.
	NoJitter float64 = -1
)

// ErrEnded is returned by Sync when Run has ended, or ends while Sync waits.
var ErrEnded = errors.New("runner has ended")

const (
	defaultMinInterval = 10 * time.Millisecond
	restFactor         = 10                    // so many times as long as a run is the interval after it,
	longestRest        = 50 * time.Millisecond // up to this or MinInterval
	defaultGather      = 2 * time.Millisecond
	mostGathers        = 2.5 // so often a request may come within Gather
	defaultBurst       = 2
	defaultMaxInterval = time.Hour
	defaultInitial     = 100 * time.Millisecond
	defaultMax         = 30 * time.Second
	defaultFactor      = 2
	defaultJitter      = 0.2

	// longest leaves room for jitter and for the time since the last run.
	longest time.Duration = math.MaxInt64 / 4
)

// WithDefaults returns o with every zero field set to its default.
func (o Options) WithDefaults() Options {
	o.MinInterval = cmp.Or(o.MinInterval, defaultMinInterval)
	if o.Gather == 0 && o.MinInterval == Unlimited {
		o.Gather = Immediately
	}
	o.Gather = cmp.Or(o.Gather, defaultGather)
	o.Burst = cmp.Or(o.Burst, defaultBurst)
	o.MaxInterval = cmp.Or(o.MaxInterval, defaultMaxInterval)
	o.Retry.Initial = cmp.Or(o.Retry.Initial, defaultInitial)
	o.Retry.Max = cmp.Or(o.Retry.Max, max(defaultMax, o.Retry.Initial))
	o.Retry.Factor = cmp.Or(o.Retry.Factor, defaultFactor)
	o.Retry.Jitter = cmp.Or(o.Retry.Jitter, defaultJitter)
	return o
}

// Validate reports every invalid field, with its value and its bound. Zero fields count as
// their defaults.
func (o Options) Validate() error {
	o = o.WithDefaults()
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(o.MinInterval > 0 || o.MinInterval == Unlimited, "MinInterval: %v is negative", o.MinInterval)
	check(o.Gather > 0 || o.Gather == Immediately, "Gather: %v is negative", o.Gather)
	check(o.Gather <= longest/4, "Gather: %v is longer than %v", o.Gather, longest/4)
	check(o.Burst > 0, "Burst: %d is negative", o.Burst)
	check(time.Duration(o.Burst) <= longest/max(o.MinInterval, longestRest),
		"Burst: %d intervals of %v are longer than %v", o.Burst, max(o.MinInterval, longestRest), longest)
	check(o.MaxInterval > 0 || o.MaxInterval == Never, "MaxInterval: %v is negative", o.MaxInterval)
	check(o.MaxInterval == Never || o.MaxInterval >= o.MinInterval,
		"MaxInterval: %v is shorter than MinInterval %v", o.MaxInterval, o.MinInterval)
	check(o.Retry.Initial >= time.Millisecond, "Retry.Initial: %v is shorter than 1ms", o.Retry.Initial)
	check(o.Retry.Max >= o.Retry.Initial, "Retry.Max: %v is shorter than Retry.Initial %v", o.Retry.Max, o.Retry.Initial)
	check(o.Retry.Max <= longest, "Retry.Max: %v is longer than %v", o.Retry.Max, longest)
	check(o.Retry.Factor >= 1, "Retry.Factor: %v is below 1", o.Retry.Factor)
	check(o.Retry.Jitter >= 0 && o.Retry.Jitter <= 1 || o.Retry.Jitter == NoJitter, "Retry.Jitter: %v is not between 0 and 1", o.Retry.Jitter)
	return errors.Join(errs...)
}
