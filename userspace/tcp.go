package userspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// tcpSocket accepts the connections of a service port.
type tcpSocket struct {
	*socket

	listener net.Listener
	slots    chan struct{} // one for each connection there may be
	held     chan struct{} // one for each connection that may wait for endpoints
}

func serveTCP(ctx context.Context, s *socket, listener net.Listener) {
	t := &tcpSocket{
		socket: s, listener: listener,
		slots: make(chan struct{}, s.config.Connections), held: make(chan struct{}, s.config.Hold.MaxPerService),
	}
	s.running.Go(func() { t.accept(ctx) })
}

// The pauses after an error of accept, such as too many open files.
const (
	firstPause   = 5 * time.Millisecond
	longestPause = time.Second
)

// accept hands connections on until ctx ends. No error ends it earlier.
func (t *tcpSocket) accept(ctx context.Context) {
	pause := firstPause
	for {
		select {
		case t.slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		conn, err := t.listener.Accept()
		if err == nil {
			pause = firstPause
			t.admit(ctx, conn)
			continue
		}
		<-t.slots
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		t.log.Warn("connections are not accepted", zap.Error(err), zap.Duration("again in", pause))
		select {
		case <-time.After(pause):
			pause = min(2*pause, longestPause)
		case <-ctx.Done():
			return
		}
	}
}

// admit serves a connection if there are descriptors for it.
func (t *tcpSocket) admit(ctx context.Context, conn net.Conn) {
	connCtx, cut := context.WithCancelCause(t.connCtx)
	l := t.take(addrPort(conn.RemoteAddr()).Addr(), perConnection, false, func() {
		cut(errCrowdedOut)
		reset(conn)
	})
	if l == nil {
		cut(nil)
		c, _ := t.connection(conn)
		r := t.report(&c)
		r.Outcome, r.Err = connection.TooMany, errNoDescriptors
		reset(conn)
		t.ended(r)
		<-t.slots
		return
	}
	t.running.Go(func() {
		defer func() { <-t.slots }()
		defer l.giveBack()
		defer cut(nil)
		t.serve(ctx, connCtx, conn, l)
	})
}

// connection says where a connection comes from, what it asked for, and whether portals
// have led it here.
func (t *tcpSocket) connection(conn net.Conn) (c Connection, led bool) {
	c = Connection{Site: t.site, Client: addrPort(conn.RemoteAddr()), Dialled: addrPort(conn.LocalAddr())}
	if t.config.Portals == nil {
		return c, true
	}
	c.Dialled, led = translatedFrom(conn, c.Dialled)
	return c, led
}

// serve takes a connection until it ends, or connCtx does. ctx ends with the socket.
// While the connection is idle, its stack has nothing of how the endpoint was found.
func (t *tcpSocket) serve(ctx, connCtx context.Context, conn net.Conn, l *lease) {
	j, r := t.join(ctx, connCtx, conn)
	defer func() { t.ended(r) }()
	if j == nil {
		reset(conn)
		return
	}
	j.lease = l
	linked, ended := t.links.add(connCtx, r.Endpoint)
	defer ended()
	if r.Sent, r.Received, r.Err = j.run(linked); r.Err != nil {
		r.Outcome = connection.Cut
	}
	if errors.Is(context.Cause(connCtx), errCrowdedOut) {
		r.Err = errCrowdedOut
	}
}

// join finds an endpoint for a client, and begins the report; nil if there is none.
func (t *tcpSocket) join(ctx, connCtx context.Context, conn net.Conn) (*joined, *connection.Report) {
	c, led := t.connection(conn)
	r := t.report(&c)
	if !led { // before its portals are there, and when they are gone, a socket is open to everybody
		r.Outcome, r.Err = connection.NotAdmitted, errNotLed
		return nil, r
	}
	upstream, err := t.connect(ctx, connCtx, c, r)
	if err != nil {
		r.Err = err
		return nil, r
	}
	j := &joined{client: conn, upstream: upstream, buffers: t.buffers}
	if t.config.ProxyProtocol {
		j.header = proxyHeader(c.Client, c.Dialled)
	}
	return j, r
}

var (
	errNotLed      = errors.New("it did not come by a portal")
	errNotAdmitted = errors.New("the source is not admitted")
	errNoEndpoints = errors.New("there are no endpoints")
	errHeldTooMany = errors.New("too many connections wait for endpoints already")
)

// connect reaches an endpoint, one after the other, until connCtx ends.
// ctx ends with the socket, and only who waits for endpoints heeds that.
func (t *tcpSocket) connect(ctx, connCtx context.Context, c Connection, r *connection.Report) (net.Conn, error) {
	scope, action := t.treatment.Load().verdict(c.Client.Addr())
	if action == desired.Drop && scope == 0 {
		r.Outcome = connection.NotAdmitted
		return nil, errNotAdmitted
	}
	r.Outcome = connection.NoEndpoints
	endpoints, arrived := t.balancer.list(scope)
	if len(endpoints) == 0 {
		if err := t.wait(ctx, connCtx, arrived, r); err != nil {
			return nil, err
		}
	}
	var tried []netip.AddrPort
	var errs []error
	for _, timeout := range dialTimeouts() {
		endpoint, ok := t.pick(c, scope, tried)
		if !ok && len(tried) > 0 {
			tried = nil // another round
			endpoint, ok = t.pick(c, scope, tried)
		}
		if !ok {
			break
		}
		conn, err := t.attempt(connCtx, c, r, endpoint, timeout)
		if err == nil {
			r.Outcome = connection.Served
			return conn, nil
		}
		r.Outcome = connection.Unreachable
		if ctx.Err() != nil || connCtx.Err() != nil {
			return nil, errCut
		}
		tried, errs = append(tried, endpoint), append(errs, err)
	}
	if len(errs) == 0 {
		return nil, errNoEndpoints
	}
	return nil, errors.Join(errs...)
}

// wait is hold, and notes the outcome in the report.
func (t *tcpSocket) wait(ctx, connCtx context.Context, arrived <-chan struct{}, r *connection.Report) error {
	err := t.hold(ctx, connCtx, arrived)
	switch {
	case errors.Is(err, errHeldTooMany):
		r.Outcome = connection.TooMany
	case t.config.Hooks.Activate != nil:
		r.Held = time.Since(r.Began)
	}
	if errors.Is(err, errCut) {
		r.Outcome = connection.Cut
	}
	return err
}

// hold waits for endpoints, if somebody provides them.
func (t *tcpSocket) hold(ctx, connCtx context.Context, arrived <-chan struct{}) error {
	if t.config.Hooks.Activate == nil {
		return errNoEndpoints
	}
	select {
	case t.held <- struct{}{}:
		defer func() { <-t.held }()
	default:
		return errHeldTooMany
	}
	t.activate(ctx)
	select {
	case <-arrived:
		return nil
	case <-ctx.Done():
		return errCut
	case <-connCtx.Done():
		return errCut
	case <-time.After(t.config.Hold.Timeout):
		return fmt.Errorf("%w after %v", errNoEndpoints, t.config.Hold.Timeout)
	}
}

// reset ends a connection so that the client notices an error, and not the end of an
// answer.
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// joined are a client and its endpoint.
type joined struct {
	client, upstream net.Conn
	header           []byte     // what the endpoint is told before
	buffers          *sync.Pool // of *[passBuffer]byte
	lease            *lease

	failing sync.Once
	failure error // the first one; others come of it
}

// passBuffer is how much of a TCP connection is passed on at a time by a buffer.
const passBuffer = 16 << 10

// errCut says that the proxy ended a connection: it closes, or the time is up that a
// connection may outlive its endpoint.
var errCut = errors.New("ended by the proxy")

// run passes bytes on in both directions until both have ended, or ctx has. Each
// direction ends by itself: a client may have said everything and still listen.
func (j *joined) run(ctx context.Context) (sent, received int64, err error) {
	stop := context.AfterFunc(ctx, j.reset)
	var other sync.WaitGroup
	other.Go(func() { sent = j.send() })
	received = j.pass(j.client, j.upstream)
	other.Wait()
	_ = j.client.Close()
	_ = j.upstream.Close()
	if !stop() {
		return sent, received, errCut
	}
	return sent, received, j.failure
}

func (j *joined) reset() {
	reset(j.client)
	reset(j.upstream)
}

// send passes on what the client says, after the header.
func (j *joined) send() (n int64) {
	if len(j.header) > 0 {
		if _, err := j.upstream.Write(j.header); err != nil {
			j.fail(err)
			return 0
		}
	}
	return j.pass(j.upstream, j.client)
}

// fail ends both directions, as nobody can answer any more.
func (j *joined) fail(err error) {
	j.failing.Do(func() { j.failure = err })
	j.reset()
}

// heard is a reader that notes when something was read.
type heard struct {
	from  io.Reader
	lease *lease
}

func (h heard) Read(buffer []byte) (int, error) {
	n, err := h.from.Read(buffer)
	h.lease.touch()
	return n, err
}

// pass copies one direction, and then tells its end.
func (j *joined) pass(to, from net.Conn) (n int64) {
	n, err := copyAll(to, from, j.buffers, j.lease)
	if err != nil {
		j.fail(err)
		return n
	}
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() // the other end may be gone already
		return n
	}
	_ = to.Close()
	return n
}
