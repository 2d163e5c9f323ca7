package userspace

import (
	"context"
	"net/netip"
	"sync"
	"time"
)

// links are the open TCP connections of a service port. It ends those that have
// outlived their endpoint for too long.
type links struct {
	drain time.Duration // 0: never

	mu         sync.Mutex // guards all below
	byEndpoint map[netip.AddrPort]map[*link]struct{}
	gone       func(netip.AddrPort) bool // says which endpoints are not there any more
}

// link is one of them.
type link struct {
	endpoint netip.AddrPort
	cut      func()
	deadline *time.Timer // nil unless its endpoint is gone
}

func newLinks(drain time.Duration) *links {
	return &links{
		drain: drain, byEndpoint: map[netip.AddrPort]map[*link]struct{}{},
		gone: func(netip.AddrPort) bool { return false },
	}
}

// add notes a connection until ended is called. The connection must end with connCtx,
// which ends with ctx at the latest.
func (l *links) add(ctx context.Context, endpoint netip.AddrPort) (connCtx context.Context, ended func()) {
	if l.drain == 0 {
		return ctx, func() {}
	}
	connCtx, cut := context.WithCancel(ctx)
	one := &link{endpoint: endpoint, cut: cut}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byEndpoint[endpoint] == nil {
		l.byEndpoint[endpoint] = map[*link]struct{}{}
	}
	l.byEndpoint[endpoint][one] = struct{}{}
	l.setDeadline(one)
	return connCtx, func() {
		cut()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.byEndpoint[endpoint], one)
		if len(l.byEndpoint[endpoint]) == 0 {
			delete(l.byEndpoint, endpoint)
		}
		if one.deadline != nil {
			one.deadline.Stop()
		}
	}
}

// update takes over which endpoints are gone. One that is back keeps its connections.
func (l *links) update(gone func(netip.AddrPort) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone = gone
	for _, of := range l.byEndpoint {
		for one := range of {
			l.setDeadline(one)
		}
	}
}

// setDeadline gives a connection a deadline, or takes it away. l.mu is held.
func (l *links) setDeadline(one *link) {
	switch gone := l.gone(one.endpoint); {
	case gone && one.deadline == nil:
		one.deadline = time.AfterFunc(l.drain, one.cut)
	case !gone && one.deadline != nil:
		one.deadline.Stop()
		one.deadline = nil
	}
}
