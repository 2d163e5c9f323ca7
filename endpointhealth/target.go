package endpointhealth

import (
	"math/rand/v2"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
)

// targetKey identifies a check.
type targetKey struct {
	place
	policy Policy // its check()
}

// place is where an endpoint listens.
type place struct {
	addr     netip.AddrPort
	protocol v1.Protocol
}

// target is an endpoint that is checked, for one or more service ports.
type target struct {
	targetKey
	users map[*servicePort]struct{}
	timer timer

	doubt               string // of connections, for the next check to confirm
	failures, successes int    // in a row
	failing             bool
	reason              string
	since               time.Time // of failing
	// level counts the ejections that are not forgotten, and hold is how long this one lasts.
	level  int
	hold   time.Duration
	passed time.Time // when failing ended last
}

// slackShare is the part of an interval by which a check may be late, within the jitter: so one
// awakening starts several checks, which costs half of the CPU time of as many awakenings.
const slackShare = 0.02

// user returns one of its service ports.
func (t *target) user() *servicePort {
	for s := range t.users {
		return s
	}
	return &servicePort{} // nobody needs it any more
}

// next returns the time of the next check.
func (t *target) next(started time.Time, interval time.Duration) time.Time {
	spread := 2*t.policy.Jitter - float64(t.timer.slack)/float64(t.policy.Interval)
	varied := 1 - t.policy.Jitter + spread*rand.Float64() //nolint:gosec // no secret
	return started.Add(time.Duration(float64(interval) * varied))
}

// first returns the time of the first check.
func (t *target) first(now time.Time, interval time.Duration) time.Time {
	return now.Add(time.Duration(rand.Float64() * float64(interval-t.timer.slack))) //nolint:gosec // no secret
}

// result takes over the result of a check, and reports whether failing has changed.
func (t *target) result(err error, now time.Time) (changed bool) {
	if err != nil {
		t.failures, t.successes = t.failures+1, 0
		if t.failing {
			t.reason = err.Error()
			return false
		}
		return t.failures >= t.policy.Failures && t.fail(err.Error(), now)
	}
	t.failures, t.successes = 0, t.successes+1
	return t.failing && t.successes >= t.policy.Successes && t.rest(now) <= 0 && t.pass(now)
}

// fail begins a failure.
func (t *target) fail(reason string, now time.Time) bool {
	if !t.passed.IsZero() {
		t.level = max(0, t.level-int(now.Sub(t.passed)/t.policy.MaxEjectFor))
	}
	t.level++
	t.hold = t.policy.hold(t.level)
	t.failing, t.reason, t.since, t.successes = true, reason, now, 0
	return true
}

// rest is how long the ejection must last yet.
func (t *target) rest(now time.Time) time.Duration { return t.since.Add(t.hold).Sub(now) }

// pass ends a failure.
func (t *target) pass(now time.Time) bool {
	t.failing, t.failures, t.reason, t.passed = false, 0, "", now
	return true
}
