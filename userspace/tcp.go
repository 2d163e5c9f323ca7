package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// tcpSocket accepts the connections of a service port.
type tcpSocket struct {
	*socket

	listener  net.Listener
	slots     chan struct{} // one for each open connection
	holdSlots chan struct{} // one for each connection that waits for endpoints
}

func (s *socket) openTCP(ctx context.Context, at Site) (net.Addr, error) {
	listener, err := s.config.Hooks.Listen(ctx, at)
	if err != nil {
		return nil, err
	}
	s.setConn(listener)
	t := &tcpSocket{
		socket: s, listener: listener,
		slots: make(chan struct{}, s.config.Connections), holdSlots: make(chan struct{}, s.config.HoldConnections),
	}
	s.close = func() { _ = listener.Close() } // ends accept
	s.serve = func() { t.accept(ctx) }
	return listener.Addr(), nil
}

// accept accepts connections until ctx ends. After an error it tries again.
func (t *tcpSocket) accept(ctx context.Context) {
	wait := firstPause
	for {
		select {
		case t.slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		conn, err := t.listener.Accept()
		if err == nil {
			if wait != firstPause {
				t.say(zap.InfoLevel, "connections are accepted again")
			}
			wait = firstPause
			t.admit(ctx, conn)
			continue
		}
		<-t.slots
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		if wait == firstPause { // said once
			t.say(zap.WarnLevel, "connections are not accepted: trying again", zap.Error(err), zap.Duration("longestPause", longestPause))
		}
		if !pause.For(ctx, wait) {
			return
		}
		wait = min(2*wait, longestPause)
	}
}

// admit serves a connection if the budget has descriptors for it.
func (t *tcpSocket) admit(ctx context.Context, conn net.Conn) {
	connCtx, cancel := context.WithCancelCause(t.connCtx)
	l := t.take(addrPort(conn.RemoteAddr()).Addr(), descriptorsPerConnection, false, func() {
		cancel(errEvicted)
		reset(conn)
	})
	if l == nil {
		cancel(nil)
		c, _ := t.connection(conn)
		r := t.report(&c)
		r.Outcome, r.Err = connection.TooMany, errNoDescriptors
		reset(conn)
		t.ended(r)
		<-t.slots
		return
	}
	t.workers.Go(t.connCtx, func() {
		defer func() { <-t.slots }()
		defer l.release()
		defer cancel(nil)
		t.relay(ctx, connCtx, conn, l)
	})
}

// connection returns the client of a connection and what it dialled, and whether a
// portal led it here.
func (t *tcpSocket) connection(conn net.Conn) (c Connection, viaPortal bool) {
	c = Connection{Site: t.site, Client: addrPort(conn.RemoteAddr()), Dialled: addrPort(conn.LocalAddr())}
	if t.config.Portals == nil {
		return c, true
	}
	c.Dialled, viaPortal = originalDst(conn, c.Dialled)
	return c, viaPortal
}

// relay serves a connection until it or connCtx ends. ctx ends with the socket. Finding
// an endpoint is a separate function, to keep the stack of idle connections small.
func (t *tcpSocket) relay(ctx, connCtx context.Context, conn net.Conn, l *lease) {
	j, r := t.newRelay(ctx, connCtx, conn)
	defer func() { t.ended(r) }()
	if j == nil {
		reset(conn)
		return
	}
	j.lease = l
	drainCtx, ended := t.drainer.add(connCtx, r.Endpoint)
	defer ended()
	start := func(f func()) { t.workers.Go(t.connCtx, f) }
	if r.Sent, r.Received, r.Err = j.run(drainCtx, start); r.Err != nil {
		r.Outcome = connection.Cut
	}
	if errors.Is(context.Cause(connCtx), errEvicted) {
		r.Err = errEvicted
	}
}

// newRelay connects a client with an endpoint and begins the report. The relay is nil if
// the client is not served.
func (t *tcpSocket) newRelay(ctx, connCtx context.Context, conn net.Conn) (*relay, *connection.Report) {
	c, viaPortal := t.connection(conn)
	r := t.report(&c)
	if !viaPortal { // the portals refuse these, but sockets open before and close after them
		r.Outcome, r.Err = connection.NotAdmitted, errNotViaPortal
		return nil, r
	}
	if t.config.Hooks.Pick != nil || t.config.Hooks.Dial != nil {
		c.first = &firstBytes{conn: conn, ends: [...]context.Context{ctx, connCtx}}
	}
	upstream, err := t.connect(ctx, connCtx, c, r)
	if err != nil {
		r.Err = err
		return nil, r
	}
	j := &relay{client: conn, upstream: upstream, first: c.first.taken(), buffers: &t.buffers, tap: t.balancer.connected(r.Endpoint)}
	if t.config.ProxyProtocol {
		j.header = proxyHeader(c.Client, c.Dialled)
	}
	return j, r
}

// connect connects to an endpoint, trying one after the other, until connCtx ends. ctx
// ends with the socket, and with it the wait for endpoints.
func (t *tcpSocket) connect(ctx, connCtx context.Context, c Connection, r *connection.Report) (net.Conn, error) {
	scope := t.scopeOf(c.Client.Addr())
	if scope == 0 {
		r.Outcome = connection.NotAdmitted
		return nil, errNotAdmitted
	}
	r.Outcome = connection.NoEndpoints
	endpoints, arrived := t.balancer.list(scope)
	if len(endpoints) == 0 {
		if err := t.hold(ctx, connCtx, arrived, r); err != nil {
			return nil, err
		}
	}
	var tried []netip.AddrPort
	var errs []error
	for _, timeout := range t.config.DialTimeouts {
		endpoint, ok := t.pick(c, scope, tried)
		if !ok && len(tried) > 0 {
			tried = nil // all have been tried: start over
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
	return nil, cmp.Or(errors.Join(errs...), errNoEndpoints)
}

// hold requests endpoints and waits for them, and records that in the report. Without the
// Activate hook it fails at once.
func (t *tcpSocket) hold(ctx, connCtx context.Context, arrived <-chan struct{}, r *connection.Report) error {
	if t.config.Hooks.Activate == nil {
		return errNoEndpoints
	}
	select {
	case t.holdSlots <- struct{}{}:
		defer func() { <-t.holdSlots }()
	default:
		r.Outcome = connection.TooMany
		return errHoldFull
	}
	t.activate(ctx)
	defer func() { r.Held = time.Since(r.Began) }()
	select {
	case <-arrived:
		return nil
	case <-time.After(t.config.HoldTimeout):
		return fmt.Errorf("%w after %v", errNoEndpoints, t.config.HoldTimeout)
	case <-ctx.Done():
	case <-connCtx.Done():
	}
	r.Outcome = connection.Cut
	return errCut
}
