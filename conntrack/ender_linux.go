package conntrack

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

const (
	// maxResetting is the number of connections that are in the kernel's table at the same
	// time; the others wait. roundSize of them are provoked in a round, at most one of which
	// begins in a roundPause.
	maxResetting = 4096
	roundSize    = 500
	roundPause   = 500 * time.Millisecond
	// longestWait is between two attempts to provoke the same client, or after failures.
	longestWait = time.Minute
	// patience is how long a client has to send a packet. One that sends data repeats it
	// at least every 2 minutes (TCP_RTO_MAX), and gives up after about 15.
	patience = 16 * time.Minute
)

// resettingConn is a connection that must end.
type resettingConn struct {
	handle netlinkx.Handle
	// client and dialled are those of the original direction, server of the reply.
	client, dialled, server netip.AddrPort
	byRule                  bool // a rule has translated it, and not IPVS
	listed                  bool // in the kernel's table
	until, due              time.Time
	wait                    time.Duration // before the next attempt
}

// resetter is the kernel as an ender needs it.
type resetter interface {
	// remove removes what list has made, also what an earlier process has left.
	remove() error
	// list resets these connections at their next packet, from either end.
	list(conns []*resettingConn) error
	// reset returns the connections whose client has got a RST.
	reset() (map[[4]byte]bool, error)
	// existing returns those of conns that conntrack still has.
	existing(conns []*resettingConn) ([]*resettingConn, error)
	// provoke makes both ends of these connections send a packet, where it can.
	provoke(conns []*resettingConn) error
	// forget undoes list for some connections, and deletes their conntrack entries if reset.
	forget(conns []*resettingConn, reset bool) error
}

// ender ends the connections of one IP family.
type ender struct {
	kernel resetter
	wake   chan struct{} // holds at most one

	// Of the goroutine of run:
	active []*resettingConn
	made   bool // there may be something in the kernel
	wait   time.Duration

	mu      sync.Mutex // guards all below
	known   map[netlinkx.Handle]struct{}
	queue   []*resettingConn
	begun   bool
	ended   int
	failure proxier.Condition
}

func newEnder(k resetter) *ender {
	return &ender{kernel: k, wake: make(chan struct{}, 1), known: map[netlinkx.Handle]struct{}{}, made: true}
}

// found adds a connection. One in a conntrack zone cannot be provoked, and one that ends by
// itself needs nothing.
func (e *ender) found(f *netlinkx.Flow) {
	h := f.Handle()
	if h.Zone || f.TCPState < tcpSynRecv || f.TCPState > tcpLastAck {
		return
	}
	e.add(&resettingConn{handle: h, client: f.Source, dialled: f.Destination, server: f.Server, byRule: f.Translated})
}

// TCP_CONNTRACK_SYN_RECV and …_LAST_ACK of linux/netfilter/nf_conntrack_tcp.h. The states of open
// connections are between them.
const (
	tcpSynRecv = 2
	tcpLastAck = 6
)

func (e *ender) add(c *resettingConn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, ok := e.known[c.handle]; ok {
		return
	}
	e.known[c.handle] = struct{}{}
	e.queue = append(e.queue, c)
}

// begin lets run work: the caller holds the names of the kernel objects.
func (e *ender) begin() {
	e.mu.Lock()
	e.begun = true
	e.mu.Unlock()
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// run ends connections until ctx ends, and then removes everything from the kernel.
func (e *ender) run(ctx context.Context, log *zap.Logger) error {
	timer := time.NewTimer(longestWait)
	defer timer.Stop()
	for {
		timer.Stop()
		if wait := e.round(time.Now(), log); wait > 0 {
			timer.Reset(wait)
		}
		select {
		case <-ctx.Done():
			return e.close()
		case <-timer.C:
		case <-e.wake:
			select { // the next round must not begin at once
			case <-time.After(roundPause):
			case <-ctx.Done():
			}
		}
	}
}

func (e *ender) close() error {
	e.mu.Lock()
	begun := e.begun
	e.mu.Unlock()
	if !begun || !e.made {
		return nil
	}
	return e.kernel.remove()
}

// round does what is due, and returns when the next round is; 0 for none.
func (e *ender) round(now time.Time, log *zap.Logger) time.Duration {
	e.mu.Lock()
	begun := e.begun
	e.mu.Unlock()
	if !begun {
		return 0
	}
	e.startWaiting(now)
	err := e.work(now)
	e.record(err, log)
	if err != nil {
		e.wait = min(max(2*e.wait, time.Second), longestWait)
		return e.wait
	}
	e.wait = 0
	return e.next(now)
}

// startWaiting begins with connections that wait, as far as there is room.
func (e *ender) startWaiting(now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := min(len(e.queue), maxResetting-len(e.active), roundSize)
	for _, c := range e.queue[:n] {
		c.until, c.due, c.wait = now.Add(patience), now, roundPause
	}
	e.active = append(e.active, e.queue[:n]...)
	if e.queue = e.queue[n:]; len(e.queue) == 0 {
		e.queue = nil
	}
}

func (e *ender) work(now time.Time) error {
	if len(e.active) == 0 {
		if !e.made {
			return nil
		}
		err := e.kernel.remove()
		e.made = err != nil
		return err
	}
	if err := e.collect(now); err != nil {
		return err
	}
	due := slices.DeleteFunc(slices.Clone(e.active), func(c *resettingConn) bool { return c.due.After(now) })
	due = due[:min(len(due), roundSize)]
	if len(due) == 0 {
		return nil
	}
	exist, err := e.kernel.existing(due)
	if err != nil {
		return err
	}
	gone := slices.DeleteFunc(slices.Clone(due), func(c *resettingConn) bool { return slices.Contains(exist, c) })
	if err := e.forget(gone, false); err != nil {
		return err
	}
	return e.provoke(now, exist)
}

// collect forgets a connection when its client has got a RST, or when it has lasted too long.
func (e *ender) collect(now time.Time) error {
	if !slices.ContainsFunc(e.active, func(c *resettingConn) bool { return c.listed }) {
		return nil
	}
	reset, err := e.kernel.reset()
	if err != nil {
		e.unlist() // another program may have deleted the table
		return err
	}
	var ended, expired []*resettingConn
	for _, c := range e.active {
		switch {
		case reset[c.handle.ID]:
			ended = append(ended, c)
		case now.After(c.until):
			expired = append(expired, c)
		}
	}
	if err := e.forget(ended, true); err != nil {
		return err
	}
	return e.forget(expired, false)
}

func (e *ender) provoke(now time.Time, conns []*resettingConn) error {
	fresh := slices.DeleteFunc(slices.Clone(conns), func(c *resettingConn) bool { return c.listed })
	if len(fresh) > 0 {
		e.made = true
		if err := e.kernel.list(fresh); err != nil {
			e.unlist()
			return err
		}
		for _, c := range fresh {
			c.listed = true
		}
	}
	for _, c := range conns {
		c.due, c.wait = now.Add(c.wait), min(2*c.wait, longestWait)
	}
	if len(conns) == 0 {
		return nil
	}
	return e.kernel.provoke(conns)
}

// unlist makes the next round list all connections again.
func (e *ender) unlist() {
	for _, c := range e.active {
		c.listed = false
	}
}

func (e *ender) forget(conns []*resettingConn, reset bool) error {
	if len(conns) == 0 {
		return nil
	}
	if err := e.kernel.forget(conns, reset); err != nil {
		e.unlist()
		return err
	}
	gone := map[*resettingConn]bool{}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range conns {
		gone[c] = true
		delete(e.known, c.handle)
		if reset {
			e.ended++
		}
	}
	e.active = slices.DeleteFunc(e.active, func(c *resettingConn) bool { return gone[c] })
	return nil
}

// next returns the time until the next round. The first rounds after an attempt look soon
// whether it has succeeded.
func (e *ender) next(now time.Time) time.Duration {
	e.mu.Lock()
	waiting := len(e.queue) > 0 && len(e.active) < maxResetting
	e.mu.Unlock()
	switch {
	case waiting:
		return roundPause
	case len(e.active) == 0 && !e.made:
		return 0
	case len(e.active) == 0:
		return roundPause
	}
	first := slices.MinFunc(e.active, func(a, b *resettingConn) int { return a.due.Compare(b.due) })
	return max(first.due.Sub(now), roundPause)
}

func (e *ender) record(err error, log *zap.Logger) {
	e.mu.Lock()
	before := e.failure
	switch {
	case err == nil:
		e.failure = proxier.Condition{}
	case before.Type == "":
		e.failure = proxier.Condition{Type: proxier.ConditionConnections, Since: time.Now(), Message: err.Error()}
	default:
		e.failure.Message = err.Error()
	}
	e.mu.Unlock()
	if err != nil && before.Type == "" {
		log.Warn("connections to endpoints that are gone are not ended, will be retried", zap.Error(err))
	}
}

// status returns how many connections must end, how many have, and what is wrong.
func (e *ender) status() (open, ended int, cannot proxier.Condition) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.known), e.ended, e.failure
}

// RunEnding is for proxier.Conntrack.
func (c *cleaner) RunEnding(ctx context.Context, log *zap.Logger) error {
	var running sync.WaitGroup
	var errs [2]error
	for i, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		running.Go(func() { errs[i] = c.ending[family].run(ctx, log.With(zap.String("family", string(family)))) })
	}
	running.Wait()
	return errors.Join(errs[:]...)
}
