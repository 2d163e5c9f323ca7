package tracing_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/internal/userspacetest"
	"github.com/serviceplane/serviceplane/node/tracing"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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
	w := userspacetest.New(t, tracing.New(provider, nil))
	port := userspacetest.Endpoint(t)
	w.Add("web", "10.96.0.1", v1.ProtocolTCP, port, "127.0.0.1")
	w.Add("flaky", "10.96.0.2", v1.ProtocolTCP, port, "127.0.0.1", "127.0.0.2")
	w.Add("empty", "10.96.0.3", v1.ProtocolTCP, port)
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
			asked := w.Socket(t, name)
			answer, client := w.Ask(t, "tcp", name)
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
			if held := root.EndTime.Sub(root.StartTime); want.outcome == connection.NoEndpoints && held < userspacetest.HoldTimeout {
				t.Errorf("it lasted %v, want %v at least", held, userspacetest.HoldTimeout)
			}
			wantPhases(t, &root, children, want.phases, want.peers)
		})
	}
}

// wantAttrs checks attributes of a connection's span.
func wantAttrs(t *testing.T, root *tracetest.SpanStub, more ...attribute.KeyValue) {
	t.Helper()
	for _, want := range append(more,
		semconv.K8SNamespaceName("test"), tracing.AttributePortName.String("main"), semconv.NetworkTransportTCP, semconv.NetworkTypeIPv4,
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
