package userspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is the timeout of clients, sufficient on a busy machine.
const patience = 20 * time.Second

func webName(protocol v1.Protocol) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: "web"}, Protocol: protocol}
}

// web returns a Service with a ClusterIP and endpoints.
func web(protocol v1.Protocol, endpoints ...netip.AddrPort) *desired.Service {
	number, _ := desired.ProtocolOf(protocol)
	slices.SortFunc(endpoints, netip.AddrPort.Compare)
	s := &desired.Service{
		Name: webName(protocol), Protocol: number, Cluster: desired.EndpointsOf(endpoints...), Port: &changetracker.ServicePort{},
		Frontends: []desired.Frontend{{
			Kind: desired.ClusterIP, VIP: netip.MustParseAddr("10.96.0.1"), Port: 80, Scope: desired.ScopeCluster, Action: desired.Forward,
		}},
	}
	if len(endpoints) == 0 {
		s.Frontends[0].Action = desired.Reject
	}
	return s
}

// engine returns an engine that is closed at the end of the test.
func engine(t *testing.T, change ...func(*Config)) *Engine {
	t.Helper()
	return logging(t, nil, change...)
}

// logging is engine with a log.
func logging(t *testing.T, log *zap.Logger, change ...func(*Config)) *Engine {
	t.Helper()
	var config Config
	for _, c := range change {
		c(&config)
	}
	e, err := NewEngine(config, v1.IPv4Protocol, proxier.Deps{Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("Close = %v, want nil", err)
		}
	})
	return e
}

func apply(t *testing.T, e *Engine, services ...*desired.Service) {
	t.Helper()
	if _, err := e.Apply(t.Context(), desired.Update{Family: v1.IPv4Protocol, Full: true, Changes: desired.ChangesTo(services...)}); err != nil {
		t.Fatalf("Apply = %v, want nil", err)
	}
}

// at returns the address of the only socket of a role.
func at(t *testing.T, e *Engine, role Role) netip.AddrPort {
	t.Helper()
	for _, site := range e.Sockets() {
		if site.Role == role {
			return site.Addr
		}
	}
	t.Fatalf("no socket of role %v among %v", role, e.Sockets())
	return netip.AddrPort{}
}

// server serves TCP connections until the test ends.
func server(t *testing.T, serve func(conn *net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			conn, err := l.AcceptTCP()
			if err != nil {
				return
			}
			running.Go(func() {
				defer conn.Close()
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		running.Wait()
	})
	return addrPort(l.Addr())
}

// named starts a server that answers with its name and the request, after the client has
// closed its half.
func named(t *testing.T, name string) netip.AddrPort {
	t.Helper()
	return server(t, func(conn *net.TCPConn) {
		heard, _ := io.ReadAll(conn)
		_, _ = fmt.Fprintf(conn, "%s heard %s", name, heard)
	})
}

// ask sends a text, closes its half, and returns the answer.
func ask(t *testing.T, to netip.AddrPort, text string) (string, error) {
	t.Helper()
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", to.String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, text); err != nil {
		return "", err
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
	}
	answer, err := io.ReadAll(conn)
	return string(answer), err
}

func mustAsk(t *testing.T, to netip.AddrPort, want string) {
	t.Helper()
	if got, err := ask(t, to, "hello"); got != want || err != nil {
		t.Errorf("answer %q, %v, want %q", got, err, want)
	}
}

// The request ends with a FIN, and the answer comes after it (W-U3).
func TestConnectionsGoRoundAndEndHalfByHalf(t *testing.T) {
	a, b := named(t, "a"), named(t, "b")
	e := engine(t)
	apply(t, e, web(v1.ProtocolTCP, a, b))
	seen := map[string]int{}
	for range 10 {
		got, err := ask(t, at(t, e, RoleInternal), "hi")
		if err != nil {
			t.Fatal(err)
		}
		seen[got]++
	}
	if seen["a heard hi"] != 5 || seen["b heard hi"] != 5 {
		t.Errorf("answers %v, want five of each", seen)
	}
}

// An endpoint that refuses, or does not answer, costs the client one attempt of at most
// 250 ms.
func TestADeadEndpointIsSkipped(t *testing.T) {
	t.Parallel()
	// Addresses of nobody: a port that was free a moment ago may be another program's.
	dead, silent := netip.MustParseAddrPort("127.255.255.253:9"), netip.MustParseAddrPort("127.255.255.254:9")
	alive := named(t, "alive")
	e := engine(t, func(c *Config) {
		c.Hooks.Dial = func(ctx context.Context, _ Connection, endpoint netip.AddrPort) (net.Conn, error) {
			if endpoint != silent {
				return (&net.Dialer{}).DialContext(ctx, "tcp", endpoint.String())
			}
			if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > 250*time.Millisecond {
				t.Errorf("the attempt ends at %v, want within 250 ms", deadline)
			}
			<-ctx.Done()
			return nil, ctx.Err()
		}
	})
	for _, bad := range []netip.AddrPort{dead, silent} {
		apply(t, e, web(v1.ProtocolTCP, bad, alive))
		for range 4 {
			mustAsk(t, at(t, e, RoleInternal), "alive heard hello")
		}
	}
}

// Without endpoints, the client gets a reset instead of an empty answer.
func TestNobodyThereIsAReset(t *testing.T) {
	e := engine(t)
	apply(t, e, web(v1.ProtocolTCP))
	if got, err := ask(t, at(t, e, RoleInternal), "hello"); err == nil {
		t.Errorf("answer %q, want an error", got)
	}
}

// Scale from zero: connections wait for endpoints, and those beyond the limit are reset.
func TestHeldUntilEndpointsCome(t *testing.T) {
	var asked atomic.Int64
	e := engine(t, func(c *Config) {
		c.HoldConnections = 3
		c.Hooks.Activate = func(_ context.Context, name changetracker.ServicePortName) {
			if name.Name == "web" {
				asked.Add(1)
			}
		}
	})
	apply(t, e, web(v1.ProtocolTCP))
	to := at(t, e, RoleInternal)
	answers := make(chan string, 5)
	for range 5 {
		go func() {
			got, err := ask(t, to, "hello")
			if err != nil {
				got = "reset"
			}
			answers <- got
		}()
	}
	for range 2 {
		if got := <-answers; got != "reset" {
			t.Errorf("answer %q, want a reset for those beyond the limit", got)
		}
	}
	apply(t, e, web(v1.ProtocolTCP, named(t, "late")))
	for range 3 {
		if got := <-answers; got != "late heard hello" {
			t.Errorf("answer %q, want the late endpoint's", got)
		}
	}
	if got := asked.Load(); got < 1 || got > 3 {
		t.Errorf("Activate was called %d times, want once per second at most", got)
	}
	if to != at(t, e, RoleInternal) {
		t.Error("the socket has moved, want it where it was")
	}
}

// Session affinity applies to all sockets of the service port, while the endpoint exists.
func TestAffinityLastsWhileItsEndpointDoes(t *testing.T) {
	a, b := named(t, "a"), named(t, "b")
	e := engine(t)
	sticky := func(endpoints ...netip.AddrPort) *desired.Service {
		s := web(v1.ProtocolTCP, endpoints...)
		s.Affinity = time.Hour
		s.Frontends = append(s.Frontends, desired.Frontend{Kind: desired.NodePort, Port: 30080, Scope: desired.ScopeCluster, Action: desired.Forward})
		return s
	}
	apply(t, e, sticky(a, b))
	first, err := ask(t, at(t, e, RoleInternal), "hello")
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		mustAsk(t, at(t, e, RoleInternal), first)
		mustAsk(t, at(t, e, RoleExternal), first)
	}
	left, want := b, "b heard hello"
	if strings.HasPrefix(first, "b") {
		left, want = a, "a heard hello"
	}
	apply(t, e, sticky(left))
	mustAsk(t, at(t, e, RoleExternal), want)
	apply(t, e, sticky(a, b))
	mustAsk(t, at(t, e, RoleInternal), want)
}

// Each socket has the traffic policy and the source ranges of its frontend.
func TestPoliciesAndSourceRanges(t *testing.T) {
	here, there := named(t, "here"), named(t, "there")
	s := web(v1.ProtocolTCP, here, there)
	s.Local = desired.EndpointsOf(here)
	s.Frontends = []desired.Frontend{
		{Kind: desired.NodePort, Port: 30080, Scope: desired.ScopeLocal, Action: desired.Forward},
		{
			Kind: desired.LoadBalancer, VIP: netip.MustParseAddr("203.0.113.1"), Port: 80, Scope: desired.ScopeLocal, Action: desired.Forward,
			Restricted: true, SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
		},
	}
	e := engine(t)
	apply(t, e, s)
	for range 4 {
		mustAsk(t, at(t, e, RoleExternal), "here heard hello")
	}
	if got, err := ask(t, at(t, e, RoleRestricted), "hello"); err == nil {
		t.Errorf("answer %q to a source that is not admitted, want an error", got)
	}
	s.Frontends[0].ShortCircuit = true // the client is on the node itself
	apply(t, e, s)
	seen := map[string]bool{}
	for range 4 {
		got, err := ask(t, at(t, e, RoleExternal), "hello")
		if err != nil {
			t.Fatal(err)
		}
		seen[got] = true
	}
	if len(seen) != 2 {
		t.Errorf("answers %v, want both endpoints for the node itself", seen)
	}
}

// The PROXY protocol sends the client's address to the endpoint.
func TestEndpointsLearnTheClientsAddress(t *testing.T) {
	header := make(chan []byte, 1)
	endpoint := server(t, func(conn *net.TCPConn) {
		b := make([]byte, 28)
		_, _ = io.ReadFull(conn, b)
		header <- b
	})
	e := engine(t, func(c *Config) { c.ProxyProtocol = true })
	apply(t, e, web(v1.ProtocolTCP, endpoint))
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at(t, e, RoleInternal).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, want := <-header, proxyHeader(addrPort(conn.LocalAddr()), addrPort(conn.RemoteAddr())); !bytes.Equal(got, want) {
		t.Errorf("header %q, want %q", got, want)
	}
}

func TestTheHeaderOfThePROXYProtocol(t *testing.T) {
	signature := "\x0d\x0a\x0d\x0a\x00\x0d\x0a\x51\x55\x49\x54\x0a\x21"
	got := string(proxyHeader(netip.MustParseAddrPort("192.0.2.1:258"), netip.MustParseAddrPort("198.51.100.2:80")))
	if want := signature + "\x11\x00\x0c\xc0\x00\x02\x01\xc6\x33\x64\x02\x01\x02\x00\x50"; got != want {
		t.Errorf("header %q, want %q", got, want)
	}
	got = string(proxyHeader(netip.MustParseAddrPort("[2001:db8::1]:1"), netip.MustParseAddrPort("192.0.2.1:2")))
	if want := signature + "\x21\x00\x24" + "\x20\x01\x0d\xb8" + strings.Repeat("\x00", 11) + "\x01" +
		strings.Repeat("\x00", 10) + "\xff\xff\xc0\x00\x02\x01" + "\x00\x01\x00\x02"; got != want {
		t.Errorf("header %q, want %q", got, want)
	}
}

// flaky is a listener whose first calls of Accept fail.
type flaky struct {
	net.Listener

	failures atomic.Int64
}

func (f *flaky) Accept() (net.Conn, error) {
	if f.failures.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return f.Listener.Accept()
}

// Accept is retried after EMFILE (W-U2). The log says it once, and when it is over.
func TestTooManyOpenFilesIsAPause(t *testing.T) {
	core, said := observer.New(zap.InfoLevel)
	e := logging(t, zap.New(core), func(c *Config) {
		c.Hooks.Listen = func(ctx context.Context, at Site) (net.Listener, error) {
			l, err := (&net.ListenConfig{}).Listen(ctx, at.Network, at.Addr.String())
			f := &flaky{Listener: l}
			f.failures.Store(5)
			return f, err
		}
	})
	apply(t, e, web(v1.ProtocolTCP, named(t, "a")))
	mustAsk(t, at(t, e, RoleInternal), "a heard hello")
	refused := said.FilterMessage("connections are not accepted: trying again").Len()
	if over := said.FilterMessage("connections are accepted again").Len(); refused != 1 || over != 1 {
		t.Errorf("the log says %d times that connections are not accepted, and %d times that they are again, want once each", refused, over)
	}
}

// failureOf joins all errors of an Apply.
func failureOf(result proxier.Result, err error) error {
	for _, failed := range result.Failed {
		err = errors.Join(err, failed)
	}
	return err
}

// A port in use is an error of one service port only, and so is SCTP.
func TestAPortThatIsTakenConcernsOneServiceOnly(t *testing.T) {
	e := engine(t, func(c *Config) {
		c.Hooks.ListenPacket = func(context.Context, Site) (net.PacketConn, error) { return nil, syscall.EADDRINUSE }
	})
	a := named(t, "a")
	sctp := web(v1.ProtocolSCTP, a)
	result, err := e.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(web(v1.ProtocolUDP, a), sctp, web(v1.ProtocolTCP, a))})
	for _, failed := range result.Failed { // a port may be free later, SCTP will never be proxied
		if failed.Terminal != errors.Is(failed, proxier.ErrNotSupported) {
			t.Errorf("%v is terminal: %t", failed, failed.Terminal)
		}
	}
	err = failureOf(result, err)
	if !errors.Is(err, syscall.EADDRINUSE) || !errors.Is(err, proxier.ErrNotSupported) || strings.Count(err.Error(), "service port") != 2 {
		t.Errorf("Apply = %v, want errors about UDP and SCTP", err)
	}
	mustAsk(t, at(t, e, RoleInternal), "a heard hello")
}

// Without Drain, connections outlive their endpoint and their Service.
func TestEstablishedConnectionsOutliveTheirEndpoint(t *testing.T) {
	echo := server(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) })
	e := engine(t)
	apply(t, e, web(v1.ProtocolTCP, echo))
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at(t, e, RoleInternal).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	say := func() error {
		if _, err := io.WriteString(conn, "x"); err != nil {
			return err
		}
		_, err := io.ReadFull(conn, make([]byte, 1))
		return err
	}
	if err := say(); err != nil {
		t.Fatal(err)
	}
	apply(t, e, web(v1.ProtocolTCP, named(t, "other")))
	if err := say(); err != nil {
		t.Errorf("after the endpoint went: %v, want an answer", err)
	}
	mustAsk(t, at(t, e, RoleInternal), "other heard hello")
	gone := at(t, e, RoleInternal)
	apply(t, e)
	if err := say(); err != nil {
		t.Errorf("after the Service went: %v, want an answer (PKT-80)", err)
	}
	if got, err := ask(t, gone, "hello"); err == nil {
		t.Errorf("a new connection after the Service went: %q, want an error", got)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if err := say(); err == nil {
		t.Error("after the engine was closed: an answer, want an error")
	}
}

// udpServer starts a server that answers each datagram with its name and the datagram.
func udpServer(t *testing.T, name string) netip.AddrPort {
	t.Helper()
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		buffer := make([]byte, maxDatagram)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(buffer)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			_, _ = conn.WriteToUDPAddrPort(append([]byte(name), buffer[:n]...), from)
		}
	})
	t.Cleanup(func() {
		_ = conn.Close()
		running.Wait()
	})
	return addrPort(conn.LocalAddr())
}

// exchange sends a datagram and returns the answer.
func exchange(t *testing.T, conn net.Conn, datagram string) string {
	t.Helper()
	if _, err := io.WriteString(conn, datagram); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	buffer := make([]byte, maxDatagram)
	n, err := conn.Read(buffer)
	if err != nil {
		return err.Error()
	}
	return string(buffer[:n])
}

func dialUDP(t *testing.T, to netip.AddrPort) net.Conn {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "udp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Each client has an endpoint until that is removed (W-U4).
func TestDatagramsOfAnySize(t *testing.T) {
	a, b := udpServer(t, "a"), udpServer(t, "b")
	e := engine(t)
	apply(t, e, web(v1.ProtocolUDP, a, b))
	to := at(t, e, RoleInternal)
	one, two := dialUDP(t, to), dialUDP(t, to)
	first, second := exchange(t, one, "1"), exchange(t, two, "1")
	if first[:1] == second[:1] {
		t.Errorf("answers %q and %q, want different endpoints", first, second)
	}
	large := strings.Repeat("x", 60000)
	if got := exchange(t, one, large); got != first[:1]+large {
		t.Errorf("answer of %d bytes to a large datagram, want %d", len(got), len(large)+1)
	}
	left, name := b, "b"
	if first[:1] == "b" {
		left, name = a, "a"
	}
	apply(t, e, web(v1.ProtocolUDP, left))
	if got := exchange(t, one, "2"); got != name+"2" {
		t.Errorf("answer %q after the endpoint went, want %q", got, name+"2")
	}
}

// UDP flows end when they are idle, and when there are too many.
func TestUDPClientsAreForgotten(t *testing.T) {
	e := engine(t, func(c *Config) { c.UDPIdle, c.UDPClients = 300*time.Millisecond, 4 })
	apply(t, e, web(v1.ProtocolUDP, udpServer(t, "a")))
	open := func() int64 {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.services[webName(v1.ProtocolUDP)].counts.Open.Load()
	}
	for i := range 20 {
		if got := exchange(t, dialUDP(t, at(t, e, RoleInternal)), fmt.Sprint(i)); got != fmt.Sprint("a", i) {
			t.Errorf("answer %q", got)
		}
	}
	poll.Until(t, "4 clients at most", func() bool { return open() <= 4 })
	poll.Until(t, "no clients", func() bool { return open() == 0 })
}

// A released port is reused as late as possible.
func TestPortsComeFromTheRange(t *testing.T) {
	p := newPortPool(PortRange{First: 40000, Last: 40003})
	var seen []uint16
	for range 4 {
		port, err := p.take()
		if err != nil || port < 40000 || port > 40003 || slices.Contains(seen, port) {
			t.Fatalf("take = %d, %v after %v", port, err, seen)
		}
		seen = append(seen, port)
	}
	if _, err := p.take(); !errors.Is(err, errNoPorts) {
		t.Errorf("take = %v, want %v", err, errNoPorts)
	}
	p.release(seen[3])
	p.release(seen[0])
	for _, want := range []uint16{seen[0], seen[3]} {
		if got, err := p.take(); got != want || err != nil {
			t.Errorf("take = %d, %v, want %d, which is next in the range", got, err, want)
		}
	}
}
