package userspace

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/desired"
)

// socket is one listening socket of a service port.
type socket struct {
	site      Site
	config    *Config
	log       *zap.Logger
	balancer  *balancer
	treatment atomic.Pointer[treatment]
	activated atomic.Int64 // when Activate was called last, in Unix nanoseconds
	counts    *counts

	start   func() // begins to serve
	stop    context.CancelFunc
	running sync.WaitGroup
	close   func() // the listening socket
	changed func() // the endpoints are others
}

// counts are running totals of a service port.
type counts struct {
	Accepted, Refused, Retried, Open atomic.Int64
}

// dialTimeouts are how long each attempt to reach an endpoint may take.
func dialTimeouts() []time.Duration {
	return []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second}
}

// reactivation is how soon Activate is called again.
const reactivation = time.Second

// activate asks for endpoints, if somebody is there to ask and not too often.
func (s *socket) activate(ctx context.Context) {
	if s.config.Hooks.Activate == nil {
		return
	}
	now, last := time.Now().UnixNano(), s.activated.Load()
	if now-last >= int64(reactivation) && s.activated.CompareAndSwap(last, now) {
		s.config.Hooks.Activate(ctx, s.site.Name)
	}
}

// pick chooses the next endpoint for a connection.
func (s *socket) pick(c Connection, scope desired.Scope, tried []netip.AddrPort) (netip.AddrPort, bool) {
	if s.config.Hooks.Pick != nil {
		endpoints, _ := s.balancer.list(scope)
		if endpoint, ok := s.config.Hooks.Pick(c, endpoints, tried); ok {
			return endpoint, true
		}
	}
	return s.balancer.pick(scope, c.Client.Addr(), tried, time.Now())
}

func (s *socket) dial(ctx context.Context, c Connection, network string, endpoint netip.AddrPort) (net.Conn, error) {
	if s.config.Hooks.Dial != nil {
		return s.config.Hooks.Dial(ctx, c, endpoint)
	}
	var d net.Dialer
	return d.DialContext(ctx, network, endpoint.String())
}

// shut ends the socket and all that came by it, and waits for it.
func (s *socket) shut() {
	s.stop()
	s.close()
	s.running.Wait()
}

// addrPort reads the address of one end of a connection.
func addrPort(a net.Addr) netip.AddrPort {
	switch a := a.(type) {
	case *net.TCPAddr:
		return unmapped(a.AddrPort())
	case *net.UDPAddr:
		return unmapped(a.AddrPort())
	default:
		parsed, _ := netip.ParseAddrPort(a.String())
		return unmapped(parsed)
	}
}

func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
