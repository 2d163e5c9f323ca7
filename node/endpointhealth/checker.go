package endpointhealth

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/namespace"
)

// Checker checks the endpoints of one Provider. Its methods may be called from several
// goroutines at once.
type Checker struct {
	options Options
	log     *zap.Logger
	passive passive

	mu  sync.Mutex // guards all below
	run *run       // nil before Run
}

// New returns a Checker. It starts nothing. The error names every invalid option.
func New(options Options) (*Checker, error) {
	if err := options.Validate(); err != nil {
		return nil, fmt.Errorf("endpoint health: %w", err)
	}
	options = options.withDefaults()
	return &Checker{options: options, log: options.Logger, passive: newPassive()}, nil
}

// Run checks until ctx ends. It returns nil after all of its goroutines have ended and its
// Overrides are removed; checks that run end with ctx. Run may be called once.
func (c *Checker) Run(ctx context.Context, source Proxy) error {
	r := newRun(c, source)
	c.mu.Lock()
	isFirst := c.run == nil
	if isFirst {
		c.run = r
	}
	c.mu.Unlock()
	if !isFirst {
		return errors.New("endpoint health: Run was called twice: make one Checker for each Provider")
	}
	limited, stop := context.WithCancel(ctx)
	r.loop(limited)
	stop()
	close(r.work)
	r.checking.Wait()
	r.threads.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	r.removeOverrides()
	return nil
}

// run is what the goroutine of Run works with. It holds the lock of the Checker except while
// it waits.
type run struct {
	*Checker
	source   Proxy
	threads  *namespace.Threads // of the network namespace
	work     chan func()        // without a buffer
	results  chan result
	checking sync.WaitGroup
	counters Summary // its counts since the start

	states  [2]*changetracker.State // that were read last
	walks   uint64
	ports   map[portKey]*servicePort
	targets map[targetKey]*target
	places  map[place][]*target
	timers  timers
	running int // checks
	waiting turns
	pace    pace
	members map[serviceKey]int // of the service ports of a Service

	dirty    map[*servicePort]struct{}
	since    time.Time // dirty is not empty
	changed  bool      // an Override that no sync was requested for
	asked    time.Time // for a sync
	nextRead time.Time
	untested bool // the last check could not be made
}

func newRun(c *Checker, source Proxy) *run {
	return &run{
		Checker: c, source: source, threads: namespace.NewThreads(c.options.NetNS), work: make(chan func()), results: make(chan result, c.options.Concurrency),
		ports: map[portKey]*servicePort{}, targets: map[targetKey]*target{}, places: map[place][]*target{}, dirty: map[*servicePort]struct{}{},
		waiting: turns{queues: map[string][]*target{}, running: map[string]int{}}, members: map[serviceKey]int{}, pace: pace{gap: time.Second / time.Duration(c.options.Rate)},
	}
}

// result is that of a check.
type result struct {
	target  *target
	of      string // the namespace
	started time.Time
	doubt   string // that it had to confirm
	err     error
}

func (c *run) loop(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-c.passive.wake:
		case r := <-c.results:
			c.locked(func() { c.record(r, time.Now()) })
		}
		var wake time.Time
		c.locked(func() { wake = c.step(ctx, time.Now()) })
		timer.Reset(time.Until(wake))
	}
}

func (c *run) locked(do func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	do()
}

// step does what is due, and returns when to wake up.
func (c *run) step(ctx context.Context, now time.Time) (wake time.Time) {
	if !now.Before(c.nextRead) {
		c.read(now)
		c.nextRead = now.Add(c.options.Pause)
	}
	c.judgeReports(now)
	for t := c.timers.due(now); t != nil; t = c.timers.due(now) {
		t.fire(now)
	}
	wake = c.nextRead
	for c.waiting.length > 0 {
		if at := c.pace.free(now); at.After(now) {
			wake = earlier(wake, at)
			break
		}
		t, of := c.waiting.next(c.options.Concurrency - c.running)
		if t == nil {
			break // the end of a check wakes
		}
		if c.targets[t.targetKey] == t {
			c.check(ctx, t, of, now)
		}
	}
	if at := c.flush(now); !at.IsZero() {
		wake = earlier(wake, at)
	}
	if len(c.timers) > 0 {
		wake = earlier(wake, c.timers[0].latest())
	}
	return wake
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// fire is called when a target's timer is due.
func (c *run) fire(t *target, now time.Time) {
	if t.policy.Probe != nil {
		c.waiting.add(t)
		return
	}
	if t.failing && t.pass(now) {
		c.markDirty(t)
	}
}

// check starts a check.
func (c *run) check(ctx context.Context, t *target, of string, now time.Time) {
	c.pace.begin()
	c.waiting.began(of)
	c.running++
	c.counters.Checks++
	limit, probe, doubt := t.policy.Timeout, t.policy.Probe, t.doubt
	if t.doubt = ""; probe == nil {
		probe = TCPProbe{}
	}
	target := Target{Addr: t.addr, Protocol: t.protocol, Dial: c.dial}
	work := func() {
		limited, stop := context.WithTimeout(ctx, limit)
		defer stop()
		err := survive(func() error { return probe.Check(limited, target) })
		if err != nil && limited.Err() != nil && ctx.Err() == nil {
			err = errTimeout
		}
		c.results <- result{t, of, now, doubt, err} // has room
	}
	select {
	case c.work <- work: // to a goroutine that waits, whose stack has grown already
	default:
		c.checking.Go(func() {
			for work != nil {
				work()
				work = <-c.work
			}
		})
	}
}

// errPanic means that a Probe panicked: a bug in the program must not eject endpoints.
var errPanic = errors.New("probe panicked")

func survive(check func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v", errPanic, r)
		}
	}()
	return check()
}

// record takes over the result of a check.
func (c *run) record(r result, now time.Time) {
	c.running--
	c.waiting.ended(r.of)
	t := r.target
	if c.targets[t.targetKey] != t {
		return // nobody needs it any more
	}
	if t.policy.Probe != nil {
		next := t.next(r.started, c.interval(t))
		if next.Before(now) {
			next = now
		}
		c.timers.set(&t.timer, next)
	}
	if local := r.err != nil && (isLocal(r.err) || errors.Is(r.err, errPanic)); local {
		c.counters.Untested++
		if !c.untested {
			c.log.Warn("endpoint cannot be checked, which does not count as its failure", zap.Stringer("endpoint", t.addr), zap.Error(r.err))
		}
		c.untested = true
		return
	}
	c.untested = false
	if r.err != nil {
		c.counters.Failures++
	} else {
		c.counters.Passed++
	}
	switch {
	case r.doubt != "" && t.failing:
	case r.doubt != "" && r.err != nil:
		c.failByConnections(t, r.doubt+"; a check: "+r.err.Error(), now)
	case t.policy.Probe != nil && t.result(r.err, now):
		c.markDirty(t)
	}
}

// interval is that of the checks of a target: longer than its CheckPolicy's if its Service has many.
func (c *run) interval(t *target) time.Duration {
	least := time.Duration(c.members[t.user().service()]) * serviceShare * c.pace.gap
	return max(t.policy.Interval, least)
}

func (c *run) failByConnections(t *target, reason string, now time.Time) {
	t.fail("connections: "+reason, now)
	if t.policy.Probe == nil {
		c.timers.set(&t.timer, now.Add(t.hold))
	}
	c.markDirty(t)
}

func (c *run) markDirty(t *target) {
	for s := range t.users {
		c.dirty[s] = struct{}{}
	}
}

// judgeReports takes over what was reported about connections.
func (c *run) judgeReports(now time.Time) {
	c.passive.each(func(at place, seen failureRecord) (done bool) {
		targets := c.places[at]
		done = true
		for _, t := range targets {
			switch {
			case t.failing || t.policy.PassiveFailures < 0:
			case seen.failures < t.policy.PassiveFailures:
				done = false
			case !seen.doubted:
				c.failByConnections(t, seen.reason, now)
			case t.doubt == "" && (t.policy.Probe != nil || t.protocol == v1.ProtocolTCP):
				t.doubt = seen.reason
				c.waiting.add(t)
			}
		}
		return done
	})
}

// flush decides about the dirty service ports and requests one sync for all that changed. It
// returns when to call it again, zero if there is nothing to do.
func (c *run) flush(now time.Time) (again time.Time) {
	if len(c.dirty) == 0 && !c.changed {
		c.since = time.Time{}
		return time.Time{}
	}
	if c.since.IsZero() {
		c.since = now
	}
	at := c.since.Add(c.options.Pause / gatherShare)
	if soonest := c.asked.Add(c.options.Pause); at.Before(soonest) {
		at = soonest
	}
	if now.Before(at) {
		return at
	}
	for s := range c.dirty {
		if again := s.decide(now); again.IsZero() {
			c.timers.stop(&s.timer)
		} else {
			c.timers.set(&s.timer, again)
		}
		c.overrideAll(s)
	}
	clear(c.dirty)
	c.since = time.Time{}
	if c.changed {
		c.changed, c.asked = false, now
		c.counters.Syncs++
		c.source.Trigger()
	}
	return time.Time{}
}

// owner names the Checker in Overrides.
const owner = "endpointhealth"

// override gives a member an Override.
func (c *run) override(s *servicePort, m *member, o changetracker.Override) {
	m.set, o.By = o, owner
	c.changed = c.source.Tracker().Override(s.name, m.addr, o) || c.changed
}

// overrideAll gives the members of a service port the Overrides that they should have.
func (c *run) overrideAll(s *servicePort) {
	for _, m := range s.members {
		if m.wanted == m.set {
			continue
		}
		switch {
		case m.wanted.Eject && !m.set.Eject:
			c.counters.Ejections++
			c.log.Warn("endpoint ejected", zap.Stringer("service", s.name), zap.Stringer("endpoint", m.addr),
				zap.String("reason", m.target.reason), zap.Duration("for", m.target.hold))
		case m.set.Eject && !m.wanted.Eject:
			c.counters.Returns++
			c.log.Info("endpoint returned", zap.Stringer("service", s.name), zap.Stringer("endpoint", m.addr), zap.Bool("failing", m.target.failing))
		}
		c.override(s, m, m.wanted)
		c.changed = true
	}
}

// removeOverrides removes all Overrides.
func (c *run) removeOverrides() {
	for key, s := range c.ports {
		c.drop(s)
		delete(c.ports, key)
	}
	if c.changed {
		c.changed = false
		c.source.Trigger()
	}
}
