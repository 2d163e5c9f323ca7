package conntrack

import (
	"cmp"
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
	listed                  bool // in the kernel's table
	cut                     bool // the kernel has no conntrack entry any more
	until, due              time.Time
	wait                    time.Duration // before the next attempt
	seen, resets            uint64        // RSTs at the last reading, and before the last attempt
}

// resetter is the kernel as an ender needs it.
type resetter interface {
	// remove removes what list has made, also what an earlier process has left, unless it
	// resets connections: left reports that.
	remove() (left bool, err error)
	// list resets these connections at their next packet without a conntrack entry, from
	// either end.
	list(conns []*resettingConn) error
	// cut deletes the conntrack entries of connections, and sets their cut. Entries that
	// were gone before are those of connections that had ended.
	cut(conns []*resettingConn) (ended []*resettingConn, err error)
	// provoke makes both ends of these connections send a packet, where it can.
	provoke(conns []*resettingConn) error
	// waiting returns how many packets of clients have got a RST, by connection. A connection
	// is missing if its client has sent a RST, or a new one has its addresses.
	waiting() (func(*resettingConn) (resets uint64, ok bool), error)
	// forget undoes list for some connections.
	forget(conns []*resettingConn) error
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

// found adds a connection. One in a conntrack zone has addresses that others may have, and one
// that ends by itself needs nothing.
func (e *ender) found(f *netlinkx.Flow) {
	h := f.Handle()
	if h.Zone || f.TCPState == netlinkx.TCPSynSent || f.TCPState > tcpLastAck {
		return
	}
	e.add(&resettingConn{handle: h, client: f.Source, dialled: f.Destination, server: f.Server})
}

// tcpLastAck is TCP_CONNTRACK_LAST_ACK of linux/netfilter/nf_conntrack_tcp.h, the last state of an open
// connection.
const tcpLastAck = 6

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

// run ends connections until ctx ends. What it has in the kernel then stays as long as it has
// connections to reset.
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
	_, err := e.kernel.remove()
	return err
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
	if err := e.collect(now); err != nil {
		return err
	}
	if err := e.reset(now); err != nil || len(e.active) > 0 || !e.made {
		return err
	}
	left, err := e.kernel.remove()
	e.made = left || err != nil
	return err
}

// reset does what is due, first for connections that have had fewer attempts.
func (e *ender) reset(now time.Time) error {
	due := slices.DeleteFunc(slices.Clone(e.active), func(c *resettingConn) bool { return c.due.After(now) })
	slices.SortStableFunc(due, func(a, b *resettingConn) int { return cmp.Compare(a.wait, b.wait) })
	due = due[:min(len(due), roundSize)]
	if err := e.list(due); err != nil {
		return err
	}
	ended, err := e.kernel.cut(slices.DeleteFunc(slices.Clone(due), func(c *resettingConn) bool { return c.cut }))
	if err != nil {
		return err
	}
	if err := e.forget(ended, false); err != nil {
		return err
	}
	return e.provoke(now, slices.DeleteFunc(due, func(c *resettingConn) bool { return !c.cut }))
}

// collect forgets a connection when its client has got a RST or sent one, when a new one has its
// addresses, or when it has lasted too long. A RST may get lost: only a client that another attempt
// does not make answer, or makes answer with a RST, has got the one before.
func (e *ender) collect(now time.Time) error {
	if !slices.ContainsFunc(e.active, func(c *resettingConn) bool { return c.listed }) {
		return nil
	}
	waiting, err := e.kernel.waiting()
	if err != nil {
		e.unlist() // another program may have deleted the table
		return err
	}
	var ended, expired []*resettingConn
	for _, c := range e.active {
		switch resets, ok := waiting(c); {
		case c.resets > 0 && (!ok || resets == c.resets && !c.due.After(now)):
			ended = append(ended, c)
		case c.listed && !ok || now.After(c.until):
			expired = append(expired, c)
		default:
			c.seen = resets
		}
	}
	if err := e.forget(ended, true); err != nil {
		return err
	}
	return e.forget(expired, false)
}

// list lists those of conns that are not listed.
func (e *ender) list(conns []*resettingConn) error {
	fresh := slices.DeleteFunc(slices.Clone(conns), func(c *resettingConn) bool { return c.listed })
	if len(fresh) == 0 {
		return nil
	}
	e.made = true
	if err := e.kernel.list(fresh); err != nil {
		e.unlist()
		return err
	}
	for _, c := range fresh {
		c.listed = true
	}
	return nil
}

func (e *ender) provoke(now time.Time, conns []*resettingConn) error {
	if len(conns) == 0 {
		return nil
	}
	for _, c := range conns {
		c.due, c.wait, c.resets = now.Add(c.wait), min(2*c.wait, longestWait), c.seen
	}
	return e.kernel.provoke(conns)
}

// unlist makes the next rounds list all connections again.
func (e *ender) unlist() {
	for _, c := range e.active {
		c.listed, c.seen, c.resets, c.due = false, 0, 0, time.Time{}
	}
}

func (e *ender) forget(conns []*resettingConn, reset bool) error {
	if len(conns) == 0 {
		return nil
	}
	if err := e.kernel.forget(conns); err != nil {
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
		return longestWait
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
