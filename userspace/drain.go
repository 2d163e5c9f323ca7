package userspace

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// drainer ends the TCP connections of a service port that last longer than Config.Drain
// after their endpoint was removed, and, if the service port asks for it, those whose endpoint
// is gone for good.
type drainer struct {
	timeout time.Duration // 0: never

	mu         sync.Mutex // guards all below
	byEndpoint map[netip.AddrPort]map[*drainingConn]struct{}
	removed    func(endpoint netip.AddrPort) bool
	gone       func(endpoint netip.AddrPort) bool // nil: connections to such ones do not end
}

// drainingConn is one open connection.
type drainingConn struct {
	endpoint netip.AddrPort
	cancel   func()
	deadline *time.Timer // nil while its endpoint exists
	lasts    time.Duration
}

func newDrainer(timeout time.Duration) *drainer {
	return &drainer{
		timeout: timeout, byEndpoint: map[netip.AddrPort]map[*drainingConn]struct{}{},
		removed: func(netip.AddrPort) bool { return false },
	}
}

// add registers a connection until ended is called. connCtx is derived from ctx; the
// connection must end with it.
func (d *drainer) add(ctx context.Context, endpoint netip.AddrPort) (connCtx context.Context, ended func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timeout == 0 && d.gone == nil {
		return ctx, func() {}
	}
	connCtx, cancel := context.WithCancel(ctx)
	conn := &drainingConn{endpoint: endpoint, cancel: cancel}
	if d.byEndpoint[endpoint] == nil {
		d.byEndpoint[endpoint] = map[*drainingConn]struct{}{}
	}
	d.byEndpoint[endpoint][conn] = struct{}{}
	d.setDeadline(conn)
	return connCtx, func() {
		cancel()
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.byEndpoint[endpoint], conn)
		if len(d.byEndpoint[endpoint]) == 0 {
			delete(d.byEndpoint, endpoint)
		}
		if conn.deadline != nil {
			conn.deadline.Stop()
		}
	}
}

// update sets which endpoints are removed, and which are gone for good; gone may be nil.
// Connections to an endpoint that is back have no deadline.
func (d *drainer) update(removed, gone func(endpoint netip.AddrPort) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.removed, d.gone = removed, gone
	for _, conns := range d.byEndpoint {
		for conn := range conns {
			d.setDeadline(conn)
		}
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
		e.config.Budget.listen(-len(s.reservations))
		s.reservations.releaseAll()
		for _, socket := range s.sockets {
			if e.config.Place == PlaceFrontends {
				socket.quit()
			}
		}
	}
	now := time.Now()
	end, quiet, accepted := now.Add(e.config.Linger), now, int64(0)
	tick := time.NewTicker(lingerPeriod)
	defer tick.Stop()
	for ; now.Before(end) && now.Sub(quiet) < lingerPause; now = <-tick.C {
		var all Traffic
		for _, t := range e.Traffic() {
			all.Accepted += t.Accepted
			all.Open += t.Open
		}
		if all.Open > 0 || all.Accepted != accepted {
			quiet, accepted = now, all.Accepted
		}
	}
}

// remove sets that no endpoint is left.
func (d *drainer) remove() {
	d.mu.Lock()
	ends := d.gone != nil
	d.mu.Unlock()
	all := func(netip.AddrPort) bool { return true }
	if ends {
		d.update(all, all)
		return
	}
	d.update(all, nil)
}

// lifetime is how long connections to an endpoint may last; 0 means no limit. The caller holds
// d.mu.
func (d *drainer) lifetime(endpoint netip.AddrPort) time.Duration {
	var after time.Duration
	if d.timeout > 0 && d.removed(endpoint) {
		after = d.timeout
	}
	if d.gone != nil && d.gone(endpoint) && (after == 0 || after > proxier.EndGrace) {
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
