package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// socket is one listening socket of a service port.
type socket struct {
	*Engine  // that it belongs to
	*service // that it serves

	site      Site
	requested netip.AddrPort // site.Addr, with port 0 if the system chose the port
	protocol  desired.Protocol
	conn      syscall.RawConn // nil for a listener of a hook that is no socket
	opened    kernelState     // of conn, when it was opened
	policy    atomic.Pointer[policy]
	retired   atomic.Bool  // no frontend needs it any more, but portals may lead to it yet
	activated atomic.Int64 // when Activate was last called, in Unix nanoseconds

	serve   func() // until the socket is closed
	stop    context.CancelFunc
	close   func() // closes the listening socket, and ends all UDP flows
	changed func() // called after the endpoints have changed
	once    sync.Once
}

// scopeOf is admit of the policy. A socket that is retired serves clients by the endpoints of the other scope
// if its own has none: the service port has another policy now, which has them.
func (s *socket) scopeOf(client netip.Addr) desired.Scope {
	scope := s.policy.Load().admit(client)
	if scope != 0 && s.retired.Load() {
		if endpoints, _ := s.balancer.list(scope); len(endpoints) == 0 {
			scope = desired.ScopeCluster + desired.ScopeLocal - scope
		}
	}
	return scope
}

// quit closes the socket for clients, releases its port, and ends the connections that wait for
// endpoints. Other TCP connections continue, and drain.
func (s *socket) quit() {
	s.once.Do(func() {
		s.stop()
		s.close()
		s.config.Budget.listen(-1)
		s.ports.release(s.requested.Port())
	})
}

// isLost reports whether another program has closed the socket.
func (s *socket) isLost() bool { return s.conn != nil && stateOf(s.conn, s.protocol) != s.opened }

// Accepting connections and reading datagrams is retried after a pause, for example when
// too many files are open. The pause doubles with each error.
const (
	firstPause   = 5 * time.Millisecond
	longestPause = time.Second
)

// handshakeGrace is how long a socket still accepts after no portal leads to it: a
// client's SYN may be on its way, and a lost one is repeated after a second (RFC 6298).
const handshakeGrace = 1500 * time.Millisecond

// take calls Budget.take for a client of this socket, and logs a shortage.
func (s *socket) take(client netip.Addr, n int, replace bool, end func()) *lease {
	l, logNow := s.config.Budget.take(s.site.Name, client, n, replace, end)
	if logNow {
		d := s.config.Budget.Descriptors()
		s.say(zap.WarnLevel, "no descriptors left for clients, refusing or ending some: raise the limit of open files, or check the clients of the service port with the most descriptors",
			zap.Int("used", d.Used), zap.Int("limit", d.Limit), zap.Stringer("most", d.Most), zap.Int("mostUsed", d.MostUsed))
	}
	return l
}

// say logs with the names of the service port and of the socket's role.
func (s *socket) say(level zapcore.Level, message string, fields ...zap.Field) {
	if entry := s.log.Check(level, message); entry != nil {
		entry.Write(append([]zap.Field{zap.Stringer("service", s.site.Name), zap.Stringer("role", s.site.Role)}, fields...)...)
	}
}

// counts are the counters of a service port.
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

// ended completes the report about a connection and sends it to the observer.
func (s *socket) ended(r *connection.Report) {
	s.counts.Open.Add(-1)
	if r.Endpoint == (netip.AddrPort{}) {
		s.counts.Refused.Add(1)
		s.say(zap.DebugLevel, "connection not served", zap.Stringer("client", r.Client), zap.Error(r.Err))
	} else {
		s.balancer.closes(r.Endpoint)
	}
	r.Duration = time.Since(r.Began)
	s.observe(*r)
}

// activateInterval is the shortest time between two calls of Activate.
const activateInterval = time.Second

// activate calls the Activate hook, at most once per activateInterval.
func (s *socket) activate(ctx context.Context) {
	if s.config.Hooks.Activate == nil {
		return
	}
	now, last := time.Now().UnixNano(), s.activated.Load()
	if now-last >= int64(activateInterval) && s.activated.CompareAndSwap(last, now) {
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
	return s.balancer.pick(scope, c.Client, tried, time.Now())
}

// dial connects to an endpoint. The timeout starts after the switch to the network
// namespace, which may take long on a busy machine. UDP has no timeout: connecting
// sends no packet, and giving up would lose the datagram.
func (s *socket) dial(ctx context.Context, c Connection, endpoint netip.AddrPort, timeout time.Duration) (conn net.Conn, err error) {
	if s.config.Hooks.Dial != nil {
		ctx, stop := context.WithTimeout(ctx, timeout)
		defer stop()
		return s.config.Hooks.Dial(ctx, c, endpoint)
	}
	err = s.refuser.inside(func() error {
		if s.protocol == desired.UDP {
			conn, err = (&net.Dialer{}).DialContext(ctx, s.site.Network, endpoint.String())
		} else {
			conn, err = dialTCP(ctx, s.site.Network, endpoint, timeout)
		}
		return err
	})
	return conn, err
}

// attempt connects to an endpoint, and records the attempt in the report.
func (s *socket) attempt(ctx context.Context, c Connection, r *connection.Report, endpoint netip.AddrPort, timeout time.Duration) (net.Conn, error) {
	began := time.Now()
	s.balancer.opens(endpoint)
	var conn net.Conn
	err := s.leadsBack(endpoint)
	if err == nil {
		conn, err = s.dial(ctx, c, endpoint, timeout)
	}
	r.Attempts = append(r.Attempts, connection.Attempt{Endpoint: endpoint, Began: began, Duration: time.Since(began), Err: err})
	if err != nil {
		s.balancer.closes(endpoint)
		s.counts.Retried.Add(1)
		return nil, fmt.Errorf("dial %v: %w", endpoint, err)
	}
	r.Endpoint = endpoint
	return conn, nil
}

// addrPort converts the address of one end of a connection.
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

// goal is the wanted state, for what is not about one service port.
type goal struct {
	now     *desired.Resolved
	globals desired.Globals
}

// leadsBack returns an error if an endpoint is a frontend: a connection to it would come back to a
// proxy of this node, and with a Service that is its own endpoint, or two that are each other's, go
// round for ever (PKT-95).
func (s *socket) leadsBack(endpoint netip.AddrPort) error {
	w := s.goal.Load()
	if w == nil {
		return nil
	}
	key := desired.Key{VIP: endpoint.Addr(), Protocol: s.protocol, Port: endpoint.Port()}
	owner, is := w.now.Owner(key)
	if !is {
		key.VIP = netip.Addr{}
		owner, is = w.now.Owner(key)
		is = is && w.globals.TakesNodePorts(endpoint.Addr()) && s.isLocal(endpoint)
	}
	if !is {
		return nil
	}
	return fmt.Errorf("%w: it is a frontend of %v: name pods in the EndpointSlice instead", errLeadsBack, owner)
}

// isLocal reports whether an address is the node's own: then the kernel chooses it as the source, too.
func (s *socket) isLocal(a netip.AddrPort) (is bool) {
	_ = s.refuser.inside(func() error {
		conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(a)) // sends nothing
		if err != nil {
			return err
		}
		is = addrPort(conn.LocalAddr()).Addr() == a.Addr()
		return conn.Close()
	})
	return is
}

// Why a connection or a UDP flow was not served, or was ended.
var (
	errNotViaPortal  = errors.New("refuse client: it connected to the proxy port directly, and not through a portal")
	errNotAdmitted   = errors.New("refuse client: its source address is not in loadBalancerSourceRanges")
	errNoEndpoints   = errors.New("no endpoints")
	errLeadsBack     = errors.New("the endpoint leads back to this proxy")
	errHoldFull      = errors.New("no endpoints, and too many connections wait for them already: see HoldConnections")
	errNoDescriptors = errors.New("no free descriptor, and the service port has its fair share: raise the limit of open files")
	// errCut means that the engine closed, or that Config.Drain expired.
	errCut     = errors.New("ended by the proxy")
	errEvicted = fmt.Errorf("%w: other clients need its descriptors: raise the limit of open files", errCut)
)
