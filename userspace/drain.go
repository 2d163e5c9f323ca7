package userspace

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier"
)

// drainer ends the TCP connections of a service port that last longer than Config.Drain
// after their endpoint was removed, and, if the service port asks for it, those whose endpoint
// is gone for good.
type drainer struct {
	timeout time.Duration // 0: never

	mu    sync.Mutex // guards all below
	conns map[*drainingConn]struct{}
	of    *desired.Service // without endpoints once it is removed
}

// drainingConn is one open connection.
type drainingConn struct {
	endpoint netip.AddrPort
	cancel   func()
	deadline *time.Timer // nil while its endpoint exists
	lasts    time.Duration
}

// add registers a connection until ended is called. connCtx is derived from ctx; the
// connection must end with it.
func (d *drainer) add(ctx context.Context, endpoint netip.AddrPort) (connCtx context.Context, ended func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timeout == 0 && !d.of.EndsConnections() {
		return ctx, func() {}
	}
	connCtx, cancel := context.WithCancel(ctx)
	conn := &drainingConn{endpoint: endpoint, cancel: cancel}
	d.conns[conn] = struct{}{}
	d.setDeadline(conn)
	return connCtx, func() {
		cancel()
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.conns, conn)
		if conn.deadline != nil {
			conn.deadline.Stop()
		}
	}
}

// update sets the service port, and with it which endpoints are removed, and which are gone for
// good. Connections to an endpoint that is back have no deadline.
func (d *drainer) update(s *desired.Service) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.of = s
	for conn := range d.conns {
		d.setDeadline(conn)
	}
}

// remove sets that no endpoint is left.
func (d *drainer) remove() {
	d.update(&desired.Service{Protocol: d.of.Protocol, Port: d.of.Port}) // only update writes it
}

// lifetime is how long connections to an endpoint may last; 0 means no limit. The caller holds
// d.mu.
func (d *drainer) lifetime(endpoint netip.AddrPort) time.Duration {
	var after time.Duration
	if d.timeout > 0 && !d.of.Serving.Has(endpoint) {
		after = d.timeout
	}
	if d.of.EndsConnections() && !d.of.Listed.Has(endpoint) && (after == 0 || after > proxier.EndGrace) {
		after = proxier.EndGrace
	}
	return after
}

// setDeadline starts or stops the deadline of a connection. The caller holds d.mu.
func (d *drainer) setDeadline(conn *drainingConn) {
	lasts := d.lifetime(conn.endpoint)
	if lasts == conn.lasts {
		return
	}
	if conn.deadline != nil {
		conn.deadline.Stop()
		conn.deadline = nil
	}
	if conn.lasts = lasts; lasts > 0 {
		conn.deadline = time.AfterFunc(lasts, conn.cancel)
	}
}

// lingerPause is how long there must be no connection before linger returns early, and
// lingerPeriod how often it looks.
const lingerPause, lingerPeriod = 5 * time.Second, 100 * time.Millisecond

// linger waits for connections to end.
func (e *Engine) linger() {
	if e.config.Linger == 0 || len(e.services) == 0 {
		return
	}
	for _, s := range e.services { // the next process needs the ports; its portals lead to its own sockets
		e.releaseUnneeded(s, &desired.Service{})
		for _, socket := range s.sockets {
			if e.config.AtFrontends {
				socket.quit()
			}
		}
	}
	began := time.Now()
	for quiet, accepted := began, int64(0); time.Since(began) < e.config.Linger && time.Since(quiet) < lingerPause; pause.For(e.connCtx, lingerPeriod) {
		var all PortCounts
		for _, t := range e.Traffic() {
			all.Accepted += t.Accepted
			all.Open += t.Open
		}
		if all.Open > 0 || all.Accepted != accepted {
			quiet, accepted = time.Now(), all.Accepted
		}
	}
}
