package metrics_test

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
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
	"github.com/serviceplane/serviceplane/userspace"
)

// patience is how long anything may take on a busy machine.
const patience = 20 * time.Second

// world is a userspace Provider on loopback. Endpoints at 127.0.0.2 refuse connections
// and are tried first.
type world struct {
	*proxier.Proxier

	sockets sync.Map // of addresses, by the name of a Service
}

// listens stores the address of a TCP socket.
func (w *world) listens(ctx context.Context, at userspace.Site) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, at.Network, at.Addr.String())
	if err == nil {
		w.sockets.Store(at.Name.Name, l.Addr().String())
	}
	return l, err
}

// listensForPackets stores the address of a UDP socket.
func (w *world) listensForPackets(ctx context.Context, at userspace.Site) (net.PacketConn, error) {
	c, err := (&net.ListenConfig{}).ListenPacket(ctx, at.Network, at.Addr.String())
	if err == nil {
		w.sockets.Store(at.Name.Name, c.LocalAddr().String())
	}
	return c, err
}

func deadFirst(_ userspace.Connection, endpoints, tried []netip.AddrPort) (netip.AddrPort, bool) {
	i := slices.IndexFunc(endpoints, func(e netip.AddrPort) bool { return e.Addr() == netip.MustParseAddr("127.0.0.2") })
	if i < 0 || len(tried) > 0 {
		return netip.AddrPort{}, false
	}
	return endpoints[i], true
}

// inUserspace runs a world until the test ends.
func inUserspace(t *testing.T, observer proxier.Observer, change ...func(*userspace.Config)) *world {
	t.Helper()
	w := &world{}
	config := userspace.Config{
		Config: proxier.Config{
			Families: []v1.IPFamily{v1.IPv4Protocol}, Runner: runner.Options{MinInterval: runner.Unlimited},
			Tracker: changetracker.Options{LoopbackEndpoints: true},
		},
		UDPIdle: 200 * time.Millisecond,
		Hold:    userspace.Hold{Timeout: 50 * time.Millisecond},
		Hooks: userspace.Hooks{
			Listen: w.listens, ListenPacket: w.listensForPackets, Pick: deadFirst,
			Activate: func(context.Context, changetracker.ServicePortName) {},
		},
	}
	for _, c := range change {
		c(&config)
	}
	var err error
	if w.Proxier, err = userspace.New(config, proxier.Deps{Observer: observer, Health: proxier.NoHealth()}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	w.OnServiceSynced()
	w.OnEndpointSlicesSynced()
	return w
}

// add adds a Service with endpoints at some addresses, all with the same port.
func (w *world) add(name, vip string, protocol v1.Protocol, port uint16, addresses ...string) {
	w.OnServiceAdd(proxiertest.Service("test", name, proxiertest.ClusterIPs(vip), proxiertest.Port("main", protocol, 80)))
	options := []proxiertest.SliceOption{proxiertest.SlicePort("main", protocol, int32(port))}
	for _, a := range addresses {
		options = append(options, proxiertest.Endpoint(a))
	}
	w.OnEndpointSliceAdd(proxiertest.Slice("test", name, discovery.AddressTypeIPv4, options...))
}

// ask sends hello to a Service, and returns the answer, or "" if there is none.
func (w *world) ask(t *testing.T, network, name string) string {
	t.Helper()
	socket, _ := w.sockets.Load(name)
	to, _ := socket.(string)
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), network, to)
	if err != nil {
		t.Fatalf("dial %s at %q: %v", name, to, err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 100)
	n, _ := conn.Read(answer) // an error counts as an empty answer
	return string(answer[:n])
}

// endpoint answers TCP clients on 127.0.0.1 until the test ends.
func endpoint(t *testing.T) (port uint16) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	serve(t, l, func() error {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		_, _ = io.ReadFull(conn, make([]byte, len("hello")))
		_, _ = io.WriteString(conn, "you said hello")
		return conn.Close()
	})
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// datagramEndpoint is endpoint for UDP.
func datagramEndpoint(t *testing.T) (port uint16) {
	t.Helper()
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	serve(t, c, func() error {
		_, from, err := c.ReadFromUDPAddrPort(make([]byte, 100))
		if err == nil {
			_, err = c.WriteToUDPAddrPort([]byte("you said hello"), from)
		}
		return err
	})
	return netip.MustParseAddrPort(c.LocalAddr().String()).Port()
}

// serve calls once until it fails, at the end of the test.
func serve(t *testing.T, socket io.Closer, once func() error) {
	t.Helper()
	var running sync.WaitGroup
	running.Go(func() {
		for once() == nil {
		}
	})
	t.Cleanup(func() {
		_ = socket.Close()
		running.Wait()
	})
}

// counting signals each counted connection on done.
type counting struct {
	*metrics.Metrics

	done chan struct{}
}

func (c counting) ObserveConnection(r connection.Report) {
	c.Metrics.ObserveConnection(r)
	c.done <- struct{}{}
}

// wait waits for n connections.
func (c counting) wait(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		select {
		case <-c.done:
		case <-time.After(patience):
			t.Fatalf("%d connections were counted after %v, want %d", i, patience, n)
		}
	}
}

// Two connections are served, one has a dead endpoint first, one has no endpoints, and one
// is a UDP client's flow.
func TestConnectionsThroughAUserspaceProxyAreMeasured(t *testing.T) {
	m, registry := measure(t, metrics.Options{Mode: "userspace", PerService: true})
	counted := counting{Metrics: m, done: make(chan struct{}, 5)}
	w := inUserspace(t, counted)
	tcp, udp := endpoint(t), datagramEndpoint(t)
	w.add("web", "10.96.0.1", v1.ProtocolTCP, tcp, "127.0.0.1")
	w.add("flaky", "10.96.0.2", v1.ProtocolTCP, tcp, "127.0.0.1", "127.0.0.2")
	w.add("empty", "10.96.0.3", v1.ProtocolTCP, tcp)
	w.add("names", "10.96.0.4", v1.ProtocolUDP, udp, "127.0.0.1")
	if err := proxiertest.Sync(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ network, name, want string }{
		{"tcp", "web", "you said hello"},
		{"tcp", "web", "you said hello"},
		{"tcp", "flaky", "you said hello"},
		{"tcp", "empty", ""},
		{"udp", "names", "you said hello"},
	} {
		if got := w.ask(t, c.network, c.name); got != c.want {
			t.Errorf("%s answers %q, want %q", c.name, got, c.want)
		}
	}
	counted.wait(t, 5)
	families := scrape(t, registry)
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"connections_total", []string{"ip_family=IPv4", "protocol=TCP", "outcome=served"}, 3},
		{"connections_total", []string{"ip_family=IPv4", "protocol=TCP", "outcome=no_endpoints"}, 1},
		{"connections_total", []string{"ip_family=IPv4", "protocol=TCP", "outcome=unreachable"}, 0},
		{"connections_total", []string{"ip_family=IPv4", "protocol=UDP", "outcome=served"}, 1},
		{"connection_bytes_total", []string{"ip_family=IPv4", "protocol=TCP", "direction=sent"}, 3 * 5},
		{"connection_bytes_total", []string{"ip_family=IPv4", "protocol=TCP", "direction=received"}, 3 * 14},
		{"connection_bytes_total", []string{"ip_family=IPv4", "protocol=UDP", "direction=sent"}, 5},
		{"connection_bytes_total", []string{"ip_family=IPv4", "protocol=UDP", "direction=received"}, 14},
		{"connection_retries_total", []string{"ip_family=IPv4", "protocol=TCP"}, 1},
		{"connection_retries_total", []string{"ip_family=IPv4", "protocol=UDP"}, 0},
		{"connection_duration_seconds", []string{"ip_family=IPv4", "protocol=TCP"}, 4},
		{"connection_duration_seconds", []string{"ip_family=IPv4", "protocol=UDP"}, 1},
		{"connection_held_seconds", []string{"ip_family=IPv4", "protocol=TCP"}, 1},
		{"service_connections_total", []string{"namespace=test", "service=web", "port=main", "protocol=TCP", "outcome=served"}, 2},
		{"service_connections_total", []string{"service=flaky", "outcome=served"}, 1},
		{"service_connections_total", []string{"service=empty", "outcome=no_endpoints"}, 1},
		{"service_connections_total", []string{"service=names", "protocol=UDP", "outcome=served"}, 1},
		{"service_connection_bytes_total", []string{"service=web", "direction=received"}, 2 * 14},
	} {
		if got := value(t, families, "serviceplane_"+c.name, c.labels...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
	if got := sum(families["serviceplane_connection_held_seconds"], []string{"ip_family=IPv4", "protocol=TCP"}); got < 0.05 {
		t.Errorf("connections were held for %vs, want 0.05s at least", got)
	}
}

// The budget suffices for two sockets and one connection; the second connection is
// refused.
func TestAShortageOfDescriptorsIsMeasured(t *testing.T) {
	m, registry := measure(t, metrics.Options{Mode: "userspace"})
	w := inUserspace(t, m, func(c *userspace.Config) { c.Budget = userspace.NewBudget(4) })
	m.Watch(metrics.Sources{Status: w.Status})
	w.add("web", "10.96.0.1", v1.ProtocolTCP, endpoint(t), "127.0.0.1")
	w.add("names", "10.96.0.4", v1.ProtocolUDP, datagramEndpoint(t), "127.0.0.1")
	if err := proxiertest.Sync(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	socket, _ := w.sockets.Load("web")
	to, _ := socket.(string)
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	wantReset(t, to)
	families := scrape(t, registry)
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"client_descriptors", nil, 2},
		{"client_descriptors_limit", nil, 2},
		{"client_descriptors_short_total", []string{"what=refused"}, 1},
		{"client_descriptors_short_total", []string{"what=ended"}, 0},
		{"condition", []string{"type=Descriptors"}, 1},
	} {
		if got := value(t, families, "serviceplane_"+c.name, append(c.labels, "ip_family=IPv4")...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
}

// wantReset connects, and expects a reset, of the handshake or of a read.
func wantReset(t *testing.T, to string) {
	t.Helper()
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", to)
	if errors.Is(err, syscall.ECONNRESET) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if answer, err := io.ReadAll(conn); len(answer) > 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the second connection is answered %q, %v, want it to be reset", answer, err)
	}
}
