package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/desired"
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
	s.close = func() { _ = listener.Close() } // accept returns by that
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
			t.running.Go(func() {
				defer func() { <-t.slots }()
				t.serve(ctx, conn)
			})
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

// serve takes a connection to its end.
func (t *tcpSocket) serve(ctx context.Context, conn net.Conn) {
	t.counts.Accepted.Add(1)
	t.counts.Open.Add(1)
	defer t.counts.Open.Add(-1)
	c := Connection{Site: t.site, Client: addrPort(conn.RemoteAddr())}
	upstream, err := t.connect(ctx, c)
	if err != nil {
		t.counts.Refused.Add(1)
		t.log.Debug("connection refused", zap.Stringer("client", c.Client), zap.Error(err))
		reset(conn)
		return
	}
	if t.config.ProxyProtocol {
		if _, err := upstream.Write(proxyHeader(c.Client, addrPort(conn.LocalAddr()))); err != nil {
			_ = upstream.Close()
			reset(conn)
			return
		}
	}
	join(ctx, conn, upstream)
}

var (
	errNotAdmitted = errors.New("the source is not admitted")
	errNoEndpoints = errors.New("there are no endpoints")
	errHeldTooMany = errors.New("too many connections wait for endpoints already")
)

// connect reaches an endpoint, one after the other.
func (t *tcpSocket) connect(ctx context.Context, c Connection) (net.Conn, error) {
	scope, action := t.treatment.Load().verdict(c.Client.Addr())
	if action == desired.Drop && scope == 0 {
		return nil, errNotAdmitted
	}
	endpoints, arrived := t.balancer.list(scope)
	if len(endpoints) == 0 {
		if err := t.hold(ctx, arrived); err != nil {
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
		attempt, stop := context.WithTimeout(ctx, timeout)
		conn, err := t.dial(attempt, c, "tcp", endpoint)
		stop()
		if err == nil {
			return conn, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		t.counts.Retried.Add(1)
		tried, errs = append(tried, endpoint), append(errs, fmt.Errorf("dial %v: %w", endpoint, err))
	}
	if len(errs) == 0 {
		return nil, errNoEndpoints
	}
	return nil, errors.Join(errs...)
}

// hold waits for endpoints, if somebody provides them.
func (t *tcpSocket) hold(ctx context.Context, arrived <-chan struct{}) error {
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
	patience, stop := context.WithTimeout(ctx, t.config.Hold.Timeout)
	defer stop()
	select {
	case <-arrived:
		return nil
	case <-patience.Done():
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

// join passes bytes on in both directions until both have ended, or ctx has. Each
// direction ends by itself: a client may have said everything and still listen.
func join(ctx context.Context, client, upstream net.Conn) {
	stop := context.AfterFunc(ctx, func() {
		reset(client)
		reset(upstream)
	})
	defer stop()
	var other sync.WaitGroup
	other.Go(func() { pass(upstream, client) })
	pass(client, upstream)
	other.Wait()
	_ = client.Close()
	_ = upstream.Close()
}

// pass copies one direction, and then tells its end. An error ends the other
// direction too, as nobody can answer any more.
func pass(to, from net.Conn) {
	if err := copyAll(to, from); err != nil {
		reset(to)
		reset(from)
		return
	}
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() // the other end may be gone already
		return
	}
	_ = to.Close()
}
