package userspace

import (
	"container/list"
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// maxDatagram is the largest that UDP can carry.
const maxDatagram = 1 << 16

// udpSocket passes on the datagrams of a service port.
type udpSocket struct {
	*socket

	packets packets
	buffers sync.Pool // of *[maxDatagram]byte

	mu sync.Mutex // guards all below
	// flows are the clients, and order has them with the one first that was quiet the
	// longest.
	flows  map[origin]*udpFlow
	order  *list.List
	closed bool
}

// udpFlow is one client.
type udpFlow struct {
	from     origin
	upstream net.Conn
	at       *list.Element
	report   *connection.Report
	lease    *lease
	cut      atomic.Bool // it did not end by itself
	crowded  atomic.Bool // it ended because others needed its descriptor

	sent, received atomic.Int64
}

func serveUDP(ctx context.Context, s *socket, conn net.PacketConn) {
	u := &udpSocket{socket: s, packets: packetsOf(conn), flows: map[origin]*udpFlow{}, order: list.New()}
	u.buffers.New = func() any { return new([maxDatagram]byte) }
	s.close = func() {
		_ = conn.Close() // the loop returns by that
		u.mu.Lock()
		u.closed = true
		u.mu.Unlock()
		u.endAll(func(*udpFlow) bool { return true })
	}
	s.changed = func() {
		u.endAll(func(f *udpFlow) bool { return !s.balancer.serves(f.report.Endpoint) })
	}
	s.running.Go(func() { u.loop(ctx) })
}

// loop hands datagrams on until ctx ends. No error ends it earlier.
func (u *udpSocket) loop(ctx context.Context) {
	buffer := make([]byte, maxDatagram)
	pause := firstPause
	for {
		n, from, err := u.packets.read(buffer)
		if err == nil {
			pause = firstPause
			u.deliver(ctx, from, buffer[:n])
			continue
		}
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		u.log.Debug("a datagram is lost", zap.Error(err))
		select {
		case <-time.After(pause):
			pause = min(2*pause, longestPause)
		case <-ctx.Done():
			return
		}
	}
}

// deliver sends a datagram to the client's endpoint. A write that fails because the
// flow has ended, or because the endpoint refused an earlier datagram (which the
// kernel tells once, to whoever comes first), has sent nothing: the client begins anew.
func (u *udpSocket) deliver(ctx context.Context, from origin, datagram []byte) {
	const attempts = 2 // who is refused again is not served better by one more
	for range attempts {
		f := u.find(from)
		if f == nil {
			if f = u.begin(ctx, from); f == nil {
				return
			}
		}
		f.sent.Add(int64(len(datagram))) // before an answer to it may end the flow, and report it
		_, err := f.upstream.Write(datagram)
		if err == nil {
			return
		}
		f.sent.Add(-int64(len(datagram)))
		if !errors.Is(err, syscall.ECONNREFUSED) && u.has(f) {
			return // like the network, which loses some
		}
		u.leave(f)
		_ = f.upstream.Close()
	}
}

// has says whether a flow goes on.
func (u *udpSocket) has(f *udpFlow) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.flows[f.from] == f
}

// find returns a client's flow, and notes that it was not quiet.
func (u *udpSocket) find(from origin) *udpFlow {
	u.mu.Lock()
	defer u.mu.Unlock()
	f := u.flows[from]
	if f != nil {
		f.lease.touch()
		u.order.MoveToBack(f.at)
	}
	return f
}

// awaits says how much longer answers may come when a flow's deadline has passed. One
// that was quiet all the time it forgets under the lock by which deliver finds flows,
// so that no datagram goes to a flow that is about to end.
func (u *udpSocket) awaits(f *udpFlow) (longer time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	longer = u.config.UDPIdle - f.lease.quiet()
	if longer <= 0 && u.flows[f.from] == f {
		u.forget(f)
	}
	return longer
}

// begin gives a client an endpoint; nil if there is none for it.
func (u *udpSocket) begin(ctx context.Context, from origin) *udpFlow {
	c := Connection{Site: u.site, Client: from.client, Dialled: u.site.Addr}
	if from.asked.IsValid() {
		c.Dialled = netip.AddrPortFrom(from.asked, u.site.Addr.Port())
	}
	f := &udpFlow{from: from, report: u.report(&c)}
	if f.report.Err = u.connect(ctx, c, f); f.report.Err != nil {
		u.ended(f.report)
		return nil
	}
	_ = f.upstream.SetReadDeadline(time.Now().Add(u.config.UDPIdle))
	u.mu.Lock()
	var oldest *udpFlow
	if u.order.Len() >= u.config.UDPClients {
		oldest, _ = u.order.Front().Value.(*udpFlow)
		u.forget(oldest)
	}
	f.at = u.order.PushBack(f)
	u.flows[from] = f
	closed := u.closed
	u.mu.Unlock()
	if oldest != nil {
		oldest.end()
	}
	if closed || f.crowded.Load() { // before it was among the flows
		f.end()
	}
	u.running.Go(func() { u.answer(f) })
	return f
}

// connect chooses an endpoint, and opens a socket towards it.
func (u *udpSocket) connect(ctx context.Context, c Connection, f *udpFlow) (err error) {
	scope, action := u.treatment.Load().verdict(c.Client.Addr())
	if action == desired.Drop && scope == 0 {
		f.report.Outcome = connection.NotAdmitted
		return errNotAdmitted
	}
	endpoint, ok := u.pick(c, scope, nil)
	if !ok {
		f.report.Outcome = connection.NoEndpoints
		u.activate(ctx)
		return errNoEndpoints
	}
	if f.lease = u.take(c.Client.Addr(), perFlow, true, func() { u.crowdOut(f) }); f.lease == nil {
		f.report.Outcome = connection.TooMany
		return errNoDescriptors
	}
	if f.upstream, err = u.attempt(ctx, c, f.report, endpoint, dialTimeouts()[0]); err != nil {
		f.lease.giveBack()
		f.report.Outcome = connection.Unreachable
	}
	return err
}

// answer passes an endpoint's datagrams back, until nobody has said anything for
// long, or the flow is closed.
func (u *udpSocket) answer(f *udpFlow) {
	r := newReceiver(f.upstream, &u.buffers)
	for {
		err := r.next(func(datagram []byte) {
			u.find(f.from)
			f.received.Add(int64(len(datagram)))
			_ = u.packets.write(datagram, f.from) // like the network, which loses some
		})
		if isTimeout(err) {
			if longer := u.awaits(f); longer > 0 {
				err = f.upstream.SetReadDeadline(time.Now().Add(longer))
			}
		}
		if err != nil {
			break // the endpoint refuses, or all was quiet: the next datagram begins anew
		}
	}
	u.leave(f)
	_ = f.upstream.Close()
	f.lease.giveBack()
	switch {
	case f.crowded.Load():
		f.report.Outcome, f.report.Err = connection.Cut, errCrowdedOut
	case f.cut.Load():
		f.report.Outcome, f.report.Err = connection.Cut, errCut
	}
	f.report.Sent, f.report.Received = f.sent.Load(), f.received.Load()
	u.ended(f.report)
}

// isTimeout says that a deadline has passed.
func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// leave takes a flow out, if that has not been done yet.
func (u *udpSocket) leave(f *udpFlow) (was bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if was = u.flows[f.from] == f; was {
		u.forget(f)
	}
	return was
}

// forget takes a flow out. u.mu is held.
func (u *udpSocket) forget(f *udpFlow) {
	delete(u.flows, f.from)
	u.order.Remove(f.at)
}

// end ends a flow; whoever waits for answers notices that.
func (f *udpFlow) end() {
	f.cut.Store(true)
	_ = f.upstream.Close()
}

// crowdOut ends a flow whose descriptor another client needs. If begin has not listed
// the flow yet, begin ends it.
func (u *udpSocket) crowdOut(f *udpFlow) {
	f.crowded.Store(true)
	if u.leave(f) {
		f.end()
	}
}

// endAll ends some flows. It closes them without the lock: Close waits for the goroutine
// that passes an answer back, which needs the lock.
func (u *udpSocket) endAll(ends func(*udpFlow) bool) {
	u.mu.Lock()
	var ending []*udpFlow
	for _, f := range u.flows {
		if ends(f) {
			u.forget(f)
			ending = append(ending, f)
		}
	}
	u.mu.Unlock()
	for _, f := range ending {
		f.end()
	}
}
