package userspace

import (
	"container/list"
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/neterror"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// udpSocket forwards the datagrams of a service port.
type udpSocket struct {
	*socket

	packets packets
	buffers sync.Pool // of *[maxDatagram]byte

	mu     sync.Mutex // guards all below
	flows  map[origin]*udpFlow
	order  *list.List // of the flows, the longest idle first
	closed bool
}

// udpFlow is the flow of one client.
type udpFlow struct {
	from     origin
	upstream net.Conn
	at       *list.Element
	served   bool // its endpoint, when it was chosen
	report   *connection.Report
	lease    *lease
	tap      tap
	cause    atomic.Pointer[error] // why the proxy or the budget ended it

	sent, received atomic.Int64
}

func (s *socket) openUDP(ctx context.Context, at Site) (net.Addr, error) {
	conn, err := s.config.Hooks.ListenPacket(ctx, at)
	if err != nil {
		return nil, err
	}
	s.setConn(conn)
	u := &udpSocket{socket: s, packets: packetsOf(conn), flows: map[origin]*udpFlow{}, order: list.New()}
	u.buffers.New = func() any { return new([maxDatagram]byte) }
	s.close = func() {
		_ = conn.Close() // ends the loop
		u.mu.Lock()
		u.closed = true
		u.mu.Unlock()
		u.endAll(func(*udpFlow) bool { return true })
	}
	s.changed = func() {
		u.endAll(func(f *udpFlow) bool { return !s.balancer.serves(f.report.Endpoint) })
	}
	s.serve = func() { u.loop(ctx) }
	return conn.LocalAddr(), nil
}

// loop forwards datagrams until ctx ends. After an error it tries again.
func (u *udpSocket) loop(ctx context.Context) {
	buffer := make([]byte, maxDatagram)
	wait := firstPause
	for {
		n, from, err := u.packets.read(buffer)
		if err == nil {
			wait = firstPause
			u.deliver(ctx, from, buffer[:n])
			continue
		}
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		u.say(zap.DebugLevel, "read datagram: trying again", zap.Error(err), zap.Duration("pause", wait))
		if !pause.For(ctx, wait) {
			return
		}
		wait = min(2*wait, longestPause)
	}
}

// deliver sends a datagram to the client's endpoint. A write fails if the flow has
// ended, or if the endpoint refused an earlier datagram: the kernel reports that once,
// to the next read or write. The datagram was not sent then, so a new flow sends it.
func (u *udpSocket) deliver(ctx context.Context, from origin, datagram []byte) {
	const attempts = 2 // the second refusal is final
	for range attempts {
		f := u.find(from)
		if f == nil {
			if f = u.begin(ctx, from); f == nil {
				return
			}
		}
		f.sent.Add(int64(len(datagram))) // first, since the answer may end the flow, which reports the counter
		_, err := f.upstream.Write(datagram)
		if err == nil {
			f.tap.in(int64(len(datagram)))
			return
		}
		f.sent.Add(-int64(len(datagram)))
		if !neterror.Refused.Is(err) && u.find(from) == f {
			return // the datagram is lost, as in a network
		}
		u.remove(f)
		_ = f.upstream.Close()
	}
	u.refuser.refuse(from.client, u.dialled(from))
}

// find returns a client's flow, and records activity.
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

// idleLeft returns how long a flow may stay idle from now on. It removes an expired flow
// while it holds the lock with which deliver finds flows, so that no datagram is sent to
// a flow that is about to end.
func (u *udpSocket) idleLeft(f *udpFlow) (left time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	left = u.config.UDPIdle - f.lease.idle()
	if left <= 0 && u.flows[f.from] == f {
		u.unlist(f)
	}
	return left
}

// begin begins a flow to an endpoint; it returns nil if the client is not served.
func (u *udpSocket) begin(ctx context.Context, from origin) *udpFlow {
	c := Connection{Site: u.site, Client: from.client, Dialled: u.dialled(from)}
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
		u.unlist(oldest)
	}
	f.at = u.order.PushBack(f)
	u.flows[from] = f
	closed := u.closed
	u.mu.Unlock()
	if oldest != nil {
		oldest.end()
	}
	gone := f.served && !u.balancer.serves(f.report.Endpoint)
	if closed || gone || f.cause.Load() != nil { // before f was in u.flows
		u.remove(f)
		f.end()
	}
	u.running.Go(func() { u.answer(f) })
	return f
}

// dialled is the address of the proxy to which a client's datagram came.
func (u *udpSocket) dialled(from origin) netip.AddrPort {
	if from.dst.IsValid() {
		return netip.AddrPortFrom(from.dst, u.site.Addr.Port())
	}
	return u.site.Addr
}

// connect chooses an endpoint, and opens a socket to it.
func (u *udpSocket) connect(ctx context.Context, c Connection, f *udpFlow) (err error) {
	scope := u.scopeOf(c.Client.Addr())
	if scope == 0 {
		f.report.Outcome = connection.NotAdmitted
		return errNotAdmitted
	}
	endpoint, ok := u.pick(c, scope, nil)
	if !ok {
		f.report.Outcome = connection.NoEndpoints
		u.activate(ctx)
		return errNoEndpoints
	}
	if f.lease = u.take(c.Client.Addr(), descriptorsPerFlow, true, func() { u.evict(f) }); f.lease == nil {
		f.report.Outcome = connection.TooMany
		return errNoDescriptors
	}
	f.served = u.balancer.serves(endpoint)
	if f.upstream, err = u.attempt(ctx, c, f.report, endpoint, u.config.DialTimeouts[0]); err != nil {
		f.lease.release()
		f.report.Outcome = connection.Unreachable
		return err
	}
	f.tap = u.balancer.connected(endpoint)
	return nil
}

// answer forwards an endpoint's datagrams to the client until the flow is idle for too
// long, refused or closed.
func (u *udpSocket) answer(f *udpFlow) {
	r := newReceiver(f.upstream, &u.buffers)
	var err error
	for err == nil { // the next datagram begins a new flow
		err = r.next(func(datagram []byte) {
			u.find(f.from)
			f.received.Add(int64(len(datagram)))
			f.tap.out(int64(len(datagram)))
			_ = u.packets.write(datagram, f.from) // if that fails, the datagram is lost, as in a network
		})
		if isTimeout(err) {
			if left := u.idleLeft(f); left > 0 {
				err = f.upstream.SetReadDeadline(time.Now().Add(left))
			}
		}
	}
	if neterror.Refused.Is(err) {
		u.refuser.refuse(f.from.client, u.dialled(f.from))
	}
	u.remove(f)
	_ = f.upstream.Close()
	f.lease.release()
	if cause := f.cause.Load(); cause != nil {
		f.report.Outcome, f.report.Err = connection.Cut, *cause
	}
	f.report.Sent, f.report.Received = f.sent.Load(), f.received.Load()
	u.ended(f.report)
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

// remove removes a flow, and returns false if it was removed before.
func (u *udpSocket) remove(f *udpFlow) (removed bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if removed = u.flows[f.from] == f; removed {
		u.unlist(f)
	}
	return removed
}

// unlist removes a flow. The caller holds u.mu.
func (u *udpSocket) unlist(f *udpFlow) {
	delete(u.flows, f.from)
	u.order.Remove(f.at)
}

// end closes the socket of a flow, and with that ends its answer goroutine.
func (f *udpFlow) end() {
	f.cause.CompareAndSwap(nil, &errCut)
	_ = f.upstream.Close()
}

// evict ends a flow whose descriptor another client needs. A flow that is not in
// u.flows yet is ended by begin.
func (u *udpSocket) evict(f *udpFlow) {
	f.cause.Store(&errEvicted)
	if u.remove(f) {
		f.end()
	}
}

// endAll ends the flows that match. It closes them without the lock: Close waits for the
// answer goroutine to finish a datagram, which needs the lock.
func (u *udpSocket) endAll(match func(*udpFlow) bool) {
	u.mu.Lock()
	var ending []*udpFlow
	for _, f := range u.flows {
		if match(f) {
			u.unlist(f)
			ending = append(ending, f)
		}
	}
	u.mu.Unlock()
	for _, f := range ending {
		f.end()
	}
}
