package userspace

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// reports is an observer that records the reports of connections.
type reports struct {
	mu  sync.Mutex // guards all below
	all []connection.Report
}

func (r *reports) ObserveSync(proxier.SyncReport) {}

func (r *reports) ObserveConnection(report connection.Report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, report)
}

// next waits for a report, and removes it.
func (r *reports) next(t *testing.T) connection.Report {
	t.Helper()
	var report connection.Report
	poll.Until(t, "a connection is reported", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.all) == 0 {
			return false
		}
		report, r.all = r.all[0], r.all[1:]
		return true
	})
	return report
}

// observed returns an engine with an observer.
func observed(t *testing.T, config Config) (*Engine, *reports) {
	t.Helper()
	r := &reports{}
	return engineOf(t, v1.IPv4Protocol, proxier.Deps{Observer: r}, config), r
}

// refusing returns an address that refuses, and that no other socket gets while the test runs: its
// port belongs to a connection with somebody else.
func refusing(t *testing.T, network string) netip.AddrPort {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), network, listens(t, network, "127.0.0.1:0").String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return addrPort(conn.LocalAddr())
}

// wanted is the expected content of a report, without times.
type wanted struct {
	outcome        connection.Outcome
	endpoint       netip.AddrPort
	attempts       []netip.AddrPort // the last one succeeds if there is an endpoint
	sent, received int64
	err            error // wrapped by Err; nil means no error
}

func mustReport(t *testing.T, got connection.Report, protocol v1.Protocol, client, asked netip.AddrPort, want wanted) {
	t.Helper()
	number, _ := desired.ProtocolOf(protocol)
	if got.Name != webName(protocol) || got.Family != v1.IPv4Protocol || got.Protocol != number {
		t.Errorf("report about %v, %v, %v, want the service port", got.Name, got.Family, got.Protocol)
	}
	if got.Client != client || got.Dialled != asked {
		t.Errorf("client %v asked %v, want %v and %v", got.Client, got.Dialled, client, asked)
	}
	if got.Outcome != want.outcome || got.Endpoint != want.endpoint {
		t.Errorf("outcome %v with endpoint %v, want %v with %v", got.Outcome, got.Endpoint, want.outcome, want.endpoint)
	}
	if got.Sent != want.sent || got.Received != want.received {
		t.Errorf("%d bytes sent and %d received, want %d and %d", got.Sent, got.Received, want.sent, want.received)
	}
	if want.err == nil && got.Err != nil || !errors.Is(got.Err, want.err) {
		t.Errorf("error %v, want %v", got.Err, want.err)
	}
	mustHaveAttempts(t, got, want)
	if ago := time.Since(got.Began); ago < got.Duration || ago > 2*patience || got.Held < 0 || got.Held > got.Duration {
		t.Errorf("began %v ago, lasted %v and was held %v", ago, got.Duration, got.Held)
	}
}

func mustHaveAttempts(t *testing.T, got connection.Report, want wanted) {
	t.Helper()
	if len(got.Attempts) != len(want.attempts) {
		t.Fatalf("attempts %v, want %v", got.Attempts, want.attempts)
	}
	for i, a := range got.Attempts {
		failed := i < len(want.attempts)-1 || !want.endpoint.IsValid()
		if a.Endpoint != want.attempts[i] || (a.Err != nil) != failed || a.Began.Before(got.Began) || a.Duration < 0 || a.Duration > got.Duration {
			t.Errorf("attempt %d = %+v, want at %v, failed %v, within the connection's time", i, a, want.attempts[i], failed)
		}
	}
}

// talk sends a text, waits for the end, and returns the client's address.
func talk(t *testing.T, to netip.AddrPort) (client netip.AddrPort) {
	t.Helper()
	client = addrPortOf("127.0.0.1", portOn(t, "127.0.0.1"))
	dialer := net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(client)}
	conn, err := dialer.DialContext(t.Context(), "tcp", to.String())
	if errors.Is(err, syscall.ECONNRESET) {
		return client // the proxy was faster
	}
	if err != nil {
		t.Error(err)
		return client
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, _ = io.WriteString(conn, "hello")
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
	}
	_, _ = io.ReadAll(conn)
	return client
}

func TestEveryOutcomeOfTCPIsReported(t *testing.T) {
	alive, dead := named(t, "alive"), refusing(t, "tcp4")
	resets := server(t, func(conn *net.TCPConn) {
		_, _ = io.ReadFull(conn, make([]byte, 5))
		_ = conn.SetLinger(0)
	})
	const answer = int64(len("alive heard hello"))
	outside := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	inOrder := func(_ Connection, endpoints, tried []netip.AddrPort) (netip.AddrPort, bool) {
		for _, e := range []netip.AddrPort{dead, resets, alive} {
			if slices.Contains(endpoints, e) && !slices.Contains(tried, e) {
				return e, true
			}
		}
		return netip.AddrPort{}, false
	}
	for name, c := range map[string]struct {
		hooks     Hooks
		header    bool
		endpoints []netip.AddrPort
		ranges    []netip.Prefix
		want      wanted
	}{
		"served": {
			endpoints: []netip.AddrPort{alive},
			want:      wanted{connection.Served, alive, []netip.AddrPort{alive}, 5, answer, nil},
		},
		"served through a hook": {
			hooks: Hooks{Dial: dialHalves}, endpoints: []netip.AddrPort{alive},
			want: wanted{connection.Served, alive, []netip.AddrPort{alive}, 5, answer, nil},
		},
		"served by the second": {
			hooks: Hooks{Pick: inOrder}, endpoints: []netip.AddrPort{dead, alive},
			want: wanted{connection.Served, alive, []netip.AddrPort{dead, alive}, 5, answer, nil},
		},
		"the header does not count": {
			header: true, endpoints: []netip.AddrPort{server(t, func(conn *net.TCPConn) { _, _ = io.Copy(io.Discard, conn) })},
			want: wanted{outcome: connection.Served, sent: 5},
		},
		"cut by the endpoint": {
			endpoints: []netip.AddrPort{resets},
			want:      wanted{connection.Cut, resets, []netip.AddrPort{resets}, 5, 0, syscall.ECONNRESET},
		},
		"not admitted": {
			endpoints: []netip.AddrPort{alive}, ranges: outside,
			want: wanted{outcome: connection.NotAdmitted, err: errNotAdmitted},
		},
		"no endpoints": {want: wanted{outcome: connection.NoEndpoints, err: errNoEndpoints}},
		"unreachable": {
			endpoints: []netip.AddrPort{dead},
			want:      wanted{outcome: connection.Unreachable, attempts: []netip.AddrPort{dead, dead, dead, dead}, err: syscall.ECONNREFUSED},
		},
	} {
		t.Run(name, func(t *testing.T) {
			e, heard := observed(t, Config{Hooks: c.hooks, ProxyProtocol: c.header})
			s := web(v1.ProtocolTCP, c.endpoints...)
			role := RoleInternal
			if c.ranges != nil {
				role, s.Frontends[0].Kind, s.Frontends[0].Restricted, s.Frontends[0].SourceRanges = RoleRestricted, desired.LoadBalancer, true, c.ranges
			}
			apply(t, e, s)
			to := at(t, e, role)
			client := talk(t, to)
			if c.header {
				c.want.endpoint, c.want.attempts = c.endpoints[0], c.endpoints
			}
			mustReport(t, heard.next(t), v1.ProtocolTCP, client, to, c.want)
			traffic, refused := e.Traffic()[s.Name], int64(0)
			if !c.want.endpoint.IsValid() {
				refused = 1
			}
			if want := (PortCounts{Accepted: 1, Refused: refused, Retried: traffic.Retried}); traffic != want {
				t.Errorf("traffic %+v, want %+v", traffic, want)
			}
		})
	}
}

// One connection waits for endpoints, and another one is beyond the limit.
func TestHeldAndTooManyAreReported(t *testing.T) {
	activated := make(chan struct{}, 1)
	e, heard := observed(t, Config{
		HoldConnections: 1,
		Hooks:           Hooks{Activate: func(context.Context, changetracker.ServicePortName) { activated <- struct{}{} }},
	})
	apply(t, e, web(v1.ProtocolTCP))
	to := at(t, e, RoleInternal)
	first := make(chan netip.AddrPort, 1)
	go func() { first <- talk(t, to) }()
	<-activated
	second := talk(t, to)
	mustReport(t, heard.next(t), v1.ProtocolTCP, second, to, wanted{outcome: connection.TooMany, err: errHoldFull})
	late := named(t, "late")
	apply(t, e, web(v1.ProtocolTCP, late))
	client, report := <-first, heard.next(t)
	mustReport(t, report, v1.ProtocolTCP, client, to, wanted{
		connection.Served, late, []netip.AddrPort{late}, 5, int64(len("late heard hello")), nil,
	})
	if report.Held <= 0 {
		t.Errorf("held %v, want more", report.Held)
	}
}

// The proxy ends a connection.
func TestACutIsReported(t *testing.T) {
	echo := server(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) })
	e, heard := observed(t, Config{})
	apply(t, e, web(v1.ProtocolTCP, echo))
	to := at(t, e, RoleInternal)
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if !lives(conn) {
		t.Fatal("the connection does not work")
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	mustReport(t, heard.next(t), v1.ProtocolTCP, addrPort(conn.LocalAddr()), to,
		wanted{connection.Cut, echo, []netip.AddrPort{echo}, 1, 1, errCut})
}

// Bytes are counted with and without splice(2).
func TestManyBytesAreCounted(t *testing.T) {
	const size = 5 << 20
	echo := server(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) })
	for name, hooks := range map[string]Hooks{
		"spliced": {},
		"copied":  {Dial: dialHalves},
	} {
		t.Run(name, func(t *testing.T) {
			e, heard := observed(t, Config{Hooks: hooks})
			apply(t, e, web(v1.ProtocolTCP, echo))
			conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", at(t, e, RoleInternal).String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(patience))
			go func() {
				_, _ = conn.Write(make([]byte, size))
				if tcp, ok := conn.(*net.TCPConn); ok {
					_ = tcp.CloseWrite()
				}
			}()
			if n, err := io.Copy(io.Discard, conn); n != size || err != nil {
				t.Errorf("%d bytes came back, %v, want %d", n, err, size)
			}
			if got := heard.next(t); got.Sent != size || got.Received != size || got.Outcome != connection.Served || got.Err != nil {
				t.Errorf("%v (%v): %d bytes sent and %d received, want %d", got.Outcome, got.Err, got.Sent, got.Received, size)
			}
		})
	}
}

// halves is a TCP connection of another type than *net.TCPConn.
type halves struct {
	net.Conn

	tcp *net.TCPConn
}

func (h halves) CloseWrite() error { return h.tcp.CloseWrite() }

func dialHalves(ctx context.Context, _ Connection, endpoint netip.AddrPort) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", endpoint.String())
	if err != nil {
		return nil, err
	}
	tcp, _ := conn.(*net.TCPConn)
	return halves{conn, tcp}, nil
}

func TestEveryOutcomeOfUDPIsReported(t *testing.T) {
	alive := udpServer(t, "a")
	broken := netip.MustParseAddrPort("127.0.0.1:9")
	outside := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	for name, c := range map[string]struct {
		endpoints []netip.AddrPort
		ranges    []netip.Prefix
		removed   bool // removal ends the flow; otherwise it is idle
		hooks     Hooks
		want      wanted
	}{
		"served": {
			endpoints: []netip.AddrPort{alive},
			want:      wanted{connection.Served, alive, []netip.AddrPort{alive}, 4, 6, nil},
		},
		"served through a hook": {
			endpoints: []netip.AddrPort{alive},
			hooks: Hooks{Dial: func(ctx context.Context, _ Connection, endpoint netip.AddrPort) (net.Conn, error) {
				conn, err := (&net.Dialer{}).DialContext(ctx, "udp", endpoint.String())
				return struct{ net.Conn }{conn}, err
			}},
			want: wanted{connection.Served, alive, []netip.AddrPort{alive}, 4, 6, nil},
		},
		"cut": {
			endpoints: []netip.AddrPort{alive}, removed: true,
			want: wanted{connection.Cut, alive, []netip.AddrPort{alive}, 4, 6, errCut},
		},
		"not admitted": {
			endpoints: []netip.AddrPort{alive}, ranges: outside,
			want: wanted{outcome: connection.NotAdmitted, err: errNotAdmitted},
		},
		"no endpoints": {want: wanted{outcome: connection.NoEndpoints, err: errNoEndpoints}},
		"unreachable": {
			endpoints: []netip.AddrPort{broken},
			hooks: Hooks{Dial: func(context.Context, Connection, netip.AddrPort) (net.Conn, error) {
				return nil, syscall.EHOSTUNREACH
			}},
			want: wanted{outcome: connection.Unreachable, attempts: []netip.AddrPort{broken}, err: syscall.EHOSTUNREACH},
		},
	} {
		t.Run(name, func(t *testing.T) {
			config := Config{Hooks: c.hooks}
			if !c.removed {
				config.UDPIdle = 200 * time.Millisecond
			}
			e, heard := observed(t, config)
			s := web(v1.ProtocolUDP, c.endpoints...)
			role := RoleInternal
			if c.ranges != nil {
				role, s.Frontends[0].Kind, s.Frontends[0].Restricted, s.Frontends[0].SourceRanges = RoleRestricted, desired.LoadBalancer, true, c.ranges
			}
			apply(t, e, s)
			to := at(t, e, role)
			conn := dialUDP(t, to)
			if c.want.endpoint.IsValid() {
				for range 2 {
					if got := exchange(t, conn, "hi"); got != "ahi" {
						t.Errorf("answer %q, want %q", got, "ahi")
					}
				}
			} else if _, err := io.WriteString(conn, "hi"); err != nil {
				t.Fatal(err)
			}
			if c.removed {
				apply(t, e)
			}
			mustReport(t, heard.next(t), v1.ProtocolUDP, addrPort(conn.LocalAddr()), to, c.want)
		})
	}
}

// A flow that ends in favor of a new client is reported as cut.
func TestAUDPClientThatMakesRoomIsCut(t *testing.T) {
	alive := udpServer(t, "a")
	e, heard := observed(t, Config{UDPClients: 1})
	apply(t, e, web(v1.ProtocolUDP, alive))
	to := at(t, e, RoleInternal)
	first, second := dialUDP(t, to), dialUDP(t, to)
	exchange(t, first, "1")
	exchange(t, second, "2")
	mustReport(t, heard.next(t), v1.ProtocolUDP, addrPort(first.LocalAddr()), to,
		wanted{connection.Cut, alive, []netip.AddrPort{alive}, 1, 2, errCut})
}
