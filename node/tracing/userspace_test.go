package tracing_test

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/tracing"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
	"github.com/serviceplane/serviceplane/userspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// holdTimeout is how long the proxy holds connections of Services without endpoints.
const holdTimeout = 50 * time.Millisecond

// world is a userspace Provider on loopback. Endpoints at 127.0.0.2 refuse connections
// and are tried first.
type world struct {
	*proxier.Proxier

	sockets sync.Map // of netip.AddrPort, by the name of a Service
}

// listens stores the address of a Service's socket.
func (w *world) listens(ctx context.Context, at userspace.Site) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, at.Network, at.Addr.String())
	if err == nil {
		w.sockets.Store(at.Name.Name, netip.MustParseAddrPort(l.Addr().String()))
	}
	return l, err
}

func deadFirst(_ userspace.Connection, endpoints, tried []netip.AddrPort) (netip.AddrPort, bool) {
	i := slices.IndexFunc(endpoints, func(e netip.AddrPort) bool { return e.Addr() == netip.MustParseAddr("127.0.0.2") })
	if i < 0 || len(tried) > 0 {
		return netip.AddrPort{}, false
	}
	return endpoints[i], true
}

// inUserspace runs a world until the test ends.
func inUserspace(t *testing.T, observer proxier.Observer) *world {
	t.Helper()
	w := &world{}
	config := userspace.Config{
		Config: proxier.Config{
			Families: []v1.IPFamily{v1.IPv4Protocol}, Runner: runner.Options{MinInterval: runner.Unlimited},
			Tracker: changetracker.Options{LoopbackEndpoints: true},
		},
		Hold: userspace.Hold{Timeout: holdTimeout},
		Hooks: userspace.Hooks{
			Listen: w.listens, Pick: deadFirst,
			Activate: func(context.Context, changetracker.ServicePortName) {},
		},
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
func (w *world) add(name, vip string, port uint16, addresses ...string) {
	w.OnServiceAdd(proxiertest.Service("test", name, proxiertest.ClusterIPs(vip), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	options := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, int32(port))}
	for _, a := range addresses {
		options = append(options, proxiertest.Endpoint(a))
	}
	w.OnEndpointSliceAdd(proxiertest.Slice("test", name, discovery.AddressTypeIPv4, options...))
}

// ask sends hello to a Service, and returns the answer, the client and the destination.
func (w *world) ask(t *testing.T, name string) (answer string, client, asked netip.AddrPort) {
	t.Helper()
	socket, _ := w.sockets.Load(name)
	asked, ok := socket.(netip.AddrPort)
	if !ok {
		t.Fatalf("%s has no socket", name)
	}
	conn, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(asked))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(poll.Timeout))
	_, _ = io.WriteString(conn, "hello")
	_ = conn.CloseWrite()
	heard, _ := io.ReadAll(conn) // an error counts as an empty answer
	return string(heard), netip.MustParseAddrPort(conn.LocalAddr().String()), asked
}

// endpoint answers clients on 127.0.0.1 until the test ends.
func endpoint(t *testing.T) (port uint16) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			heard, _ := io.ReadAll(conn)
			_, _ = conn.Write(append([]byte("you said "), heard...))
			_ = conn.Close()
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		running.Wait()
	})
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// traceOf waits for the trace of the only connection of a Service.
func traceOf(t *testing.T, exporter *tracetest.InMemoryExporter, name string) (root tracetest.SpanStub, children tracetest.SpanStubs) {
	t.Helper()
	poll.Until(t, "a trace of a connection to "+name, func() bool {
		roots, all := shown(exporter.GetSpans())
		i := slices.IndexFunc(roots, func(s tracetest.SpanStub) bool {
			service, _ := attr(&s, semconv.K8SServiceNameKey)
			return service.AsString() == name
		})
		if i >= 0 {
			root, children = roots[i], all[roots[i].SpanContext.SpanID()]
		}
		return i >= 0
	})
	return root, children
}

// One connection is served, one has a dead endpoint first, and one has no endpoints.
func TestConnectionsThroughAUserspaceProxyAreTraces(t *testing.T) {
	provider, exporter := memory(t)
	w := inUserspace(t, tracing.New(provider, nil))
	port := endpoint(t)
	w.add("web", "10.96.0.1", port, "127.0.0.1")
	w.add("flaky", "10.96.0.2", port, "127.0.0.1", "127.0.0.2")
	w.add("empty", "10.96.0.3", port)
	if err := proxiertest.Sync(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	lives := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String()
	died := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), port).String()
	for name, want := range map[string]struct {
		answer, endpoint string
		outcome          connection.Outcome
		phases, peers    []string
	}{
		"web":   {"you said hello", lives, connection.Served, []string{"dial", "proxied"}, []string{lives}},
		"flaky": {"you said hello", lives, connection.Served, []string{"dial", "dial", "proxied"}, []string{died, lives}},
		"empty": {"", "", connection.NoEndpoints, []string{"held"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			before := time.Now()
			answer, client, asked := w.ask(t, name)
			if answer != want.answer {
				t.Errorf("answer %q, want %q", answer, want.answer)
			}
			root, children := traceOf(t, exporter, name)
			wantAttrs(t, &root, tracing.AttributeOutcome.String(want.outcome.String()),
				semconv.ClientAddress("127.0.0.1"), semconv.ClientPort(int(client.Port())),
				semconv.ServerAddress("127.0.0.1"), semconv.ServerPort(int(asked.Port())),
				tracing.AttributeReceived.Int(len(want.answer)))
			if want.outcome == connection.Served {
				wantAttrs(t, &root, tracing.AttributeEndpoint.String(want.endpoint), tracing.AttributeSent.Int(len("hello")))
			}
			if failed := root.Status.Code == codes.Error; failed != (want.outcome != connection.Served) {
				t.Errorf("status %+v of a connection that is %v", root.Status, want.outcome)
			}
			if root.StartTime.Before(before) || root.EndTime.After(time.Now()) {
				t.Errorf("from %v to %v, want it between %v and now", root.StartTime, root.EndTime, before)
			}
			if held := root.EndTime.Sub(root.StartTime); want.outcome == connection.NoEndpoints && held < holdTimeout {
				t.Errorf("it lasted %v, want %v at least", held, holdTimeout)
			}
			wantPhases(t, &root, children, want.phases, want.peers)
		})
	}
}

// wantAttrs checks attributes of a connection's span.
func wantAttrs(t *testing.T, root *tracetest.SpanStub, more ...attribute.KeyValue) {
	t.Helper()
	for _, want := range append(more,
		semconv.K8SNamespaceName("test"), tracing.AttributePortName.String("http"), semconv.NetworkTransportTCP, semconv.NetworkTypeIPv4,
	) {
		if got, ok := attr(root, want.Key); !ok || got != want.Value {
			t.Errorf("%s = %q, want %q", want.Key, got.String(), want.Value.String())
		}
	}
}

// wantPhases checks that the child spans of a connection do not overlap, and which
// endpoints were tried; the last one succeeds.
func wantPhases(t *testing.T, root *tracetest.SpanStub, children tracetest.SpanStubs, names, peers []string) {
	t.Helper()
	var gotNames, gotPeers []string
	last := root.StartTime
	for i := range children {
		p := phaseOf(&children[i], last)
		if p.From < 0 || p.To < p.From || children[i].EndTime.After(root.EndTime) {
			t.Errorf("%s lasts from %v to %v after the one before, want it to follow that, and end before %v", p.Name, p.From, p.To, root.EndTime)
		}
		last = children[i].EndTime
		gotNames = append(gotNames, p.Name)
		if p.Peer == "" {
			continue
		}
		gotPeers = append(gotPeers, p.Peer)
		if isLast := len(gotPeers) == len(peers); isLast != (p.Error == "") {
			t.Errorf("attempt %d, at %s: error %q, want one for all but the last", len(gotPeers), p.Peer, p.Error)
		}
	}
	if !slices.Equal(gotNames, names) || !slices.Equal(gotPeers, peers) {
		t.Errorf("spans %v, endpoints %v, want %v and %v", gotNames, gotPeers, names, peers)
	}
}
