package userspace

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// socket is one listening socket of a service port.
type socket struct {
	site      Site
	held      netip.AddrPort // what it has of Addresses and Ports
	family    v1.IPFamily
	protocol  desired.Protocol
	config    *Config
	log       *zap.Logger
	balancer  *balancer
	links     *links
	counts    *counts
	observe   func(connection.Report)
	treatment atomic.Pointer[treatment]
	activated atomic.Int64 // when Activate was called last, in Unix nanoseconds
	// inside runs f in Config.NetNS.
	inside func(f func() error) error

	connCtx context.Context //nolint:containedctx // the engine's, of connections
	running *sync.WaitGroup // all of the engine
	buffers *sync.Pool      // of *[passBuffer]byte
	start   func()          // begins to serve
	stop    context.CancelFunc
	close   func() // the listening socket, and all flows of UDP
	changed func() // the endpoints are others
}

// handshake is how long a connection may take that was led here when a portal changed:
// the client repeats a lost SYN after a second (RFC 6298).
const handshake = 1500 * time.Millisecond

// retire ends the socket, after a while if clients may still be on their way, and what
// waits there for endpoints. TCP connections go on. Then it calls free.
func (s *socket) retire(after time.Duration, free func()) {
	end := func() {
		s.stop()
		s.close()
		s.config.Budget.listen(-1)
		free()
	}
	if after == 0 {
		end()
		return
	}
	s.running.Go(func() {
		late := time.NewTimer(after)
		defer late.Stop()
		select {
		case <-late.C:
		case <-s.connCtx.Done():
		}
		end()
	})
}

// take is Budget.take for a client of this socket.
func (s *socket) take(client netip.Addr, n int, replace bool, end func()) *lease {
	l, news := s.config.Budget.take(s.site.Name, client, n, replace, end)
	if news {
		d := s.config.Budget.Descriptors()
		s.log.Warn("descriptors for clients are used up, some clients are refused or ended: raise the limit of open files, or look at the clients of the service port that has the most",
			zap.Int("used", d.Used), zap.Int("limit", d.Limit), zap.Stringer("most", d.Most), zap.Int("mostUsed", d.MostUsed))
	}
	return l
}

// counts are running totals of a service port.
type counts struct {
	Accepted, Refused, Retried, Open atomic.Int64
}

// report begins the report about a connection.
func (s *socket) report(c *Connection) *connection.Report {
	s.counts.Accepted.Add(1)
	s.counts.Open.Add(1)
	return &connection.Report{
		Name: s.site.Name, Family: s.family, Protocol: s.protocol, Client: c.Client, Dialled: c.Dialled,
		Began: time.Now(), Outcome: connection.Served,
	}
}

// ended tells of a connection.
func (s *socket) ended(r *connection.Report) {
	s.counts.Open.Add(-1)
	if r.Endpoint == (netip.AddrPort{}) {
		s.counts.Refused.Add(1)
		s.log.Debug("not served", zap.Stringer("client", r.Client), zap.Error(r.Err))
	}
	r.Duration = time.Since(r.Began)
	s.observe(*r)
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

// dial reaches an endpoint. The time of an attempt is the endpoint's: it begins when
// the thread is in the namespace, which takes long on a busy machine. A UDP socket
// needs nobody's answer to be connected, and giving that up would lose the datagram.
func (s *socket) dial(ctx context.Context, c Connection, endpoint netip.AddrPort, timeout time.Duration) (conn net.Conn, err error) {
	if s.config.Hooks.Dial != nil {
		ctx, stop := context.WithTimeout(ctx, timeout)
		defer stop()
		return s.config.Hooks.Dial(ctx, c, endpoint)
	}
	if s.protocol == desired.UDP {
		timeout = 0 // none
	}
	err = s.inside(func() error {
		d := net.Dialer{Timeout: timeout} // not DialTCP, which would bind a port without need
		conn, err = d.DialContext(ctx, s.site.Network, endpoint.String())
		return err
	})
	return conn, err
}

// attempt tries to reach an endpoint, and notes that.
func (s *socket) attempt(ctx context.Context, c Connection, r *connection.Report, endpoint netip.AddrPort, timeout time.Duration) (net.Conn, error) {
	began := time.Now()
	conn, err := s.dial(ctx, c, endpoint, timeout)
	r.Attempts = append(r.Attempts, connection.Attempt{Endpoint: endpoint, Began: began, Duration: time.Since(began), Err: err})
	if err != nil {
		s.counts.Retried.Add(1)
		return nil, fmt.Errorf("dial %v: %w", endpoint, err)
	}
	r.Endpoint = endpoint
	return conn, nil
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
