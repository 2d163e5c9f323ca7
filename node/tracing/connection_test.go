package tracing_test

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/tracing"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

var (
	began = time.Unix(1000, 0)
	dead  = netip.MustParseAddrPort("[2001:db8::1]:8080")
	alive = netip.MustParseAddrPort("[2001:db8::2]:8081")
)

// connection waited for a second, tried a dead endpoint for a second, connected to another
// one after a third, and lasted ten.
func servedOne() connection.Report {
	return connection.Report{
		Name: changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "test", Name: "web"}, Port: "http", Protocol: v1.ProtocolTCP,
		},
		Family: v1.IPv6Protocol, Protocol: desired.TCP, Outcome: connection.Served,
		Client: netip.MustParseAddrPort("[2001:db8::c]:40000"), Dialled: netip.MustParseAddrPort("[2001:db8::f]:80"), Endpoint: alive,
		Attempts: []connection.Attempt{
			{Endpoint: dead, Began: began.Add(time.Second), Duration: time.Second, Err: errors.New("refused")},
			{Endpoint: alive, Began: began.Add(2 * time.Second), Duration: time.Second},
		},
		Began: began, Held: time.Second, Duration: 10 * time.Second, Sent: 5, Received: 7,
	}
}

// unserved reports a connection without endpoints.
func unserved() connection.Report {
	r := servedOne()
	r.Endpoint, r.Attempts, r.Outcome = netip.AddrPort{}, nil, connection.NoEndpoints
	return r
}

// phase holds the tested fields of a span.
type phase struct {
	Name     string
	From, To time.Duration // since the connection began
	Kind     trace.SpanKind
	Peer     string
	Error    string
}

// shown returns the spans of connections: the roots sorted by start, and the children of
// each.
func shown(spans tracetest.SpanStubs) (roots tracetest.SpanStubs, children map[trace.SpanID]tracetest.SpanStubs) {
	children = map[trace.SpanID]tracetest.SpanStubs{}
	for _, s := range spans {
		if s.Name == "connection" && !s.Parent.IsValid() {
			roots = append(roots, s)
		}
		children[s.Parent.SpanID()] = append(children[s.Parent.SpanID()], s)
	}
	byStart := func(a, b tracetest.SpanStub) int { return a.StartTime.Compare(b.StartTime) }
	slices.SortStableFunc(roots, byStart)
	for _, of := range children {
		slices.SortStableFunc(of, byStart)
	}
	return roots, children
}

func phaseOf(s *tracetest.SpanStub, began time.Time) phase {
	p := phase{Name: s.Name, From: s.StartTime.Sub(began), To: s.EndTime.Sub(began), Kind: s.SpanKind}
	if address, ok := attr(s, semconv.NetworkPeerAddressKey); ok {
		port, _ := attr(s, semconv.NetworkPeerPortKey)
		p.Peer = netip.AddrPortFrom(netip.MustParseAddr(address.AsString()), uint16(port.AsInt64())).String()
	}
	if s.Status.Code == codes.Error {
		p.Error = cmp.Or(s.Status.Description, "no description")
	}
	return p
}

func attr(s *tracetest.SpanStub, key attribute.Key) (attribute.Value, bool) {
	i := slices.IndexFunc(s.Attributes, func(a attribute.KeyValue) bool { return a.Key == key })
	if i < 0 {
		return attribute.Value{}, false
	}
	return s.Attributes[i].Value, true
}

// one returns the only trace of a connection.
func one(t *testing.T, spans tracetest.SpanStubs) (root tracetest.SpanStub, phases []phase) {
	t.Helper()
	roots, children := shown(spans)
	if len(roots) != 1 {
		t.Fatalf("%d traces of connections among %v, want 1", len(roots), spans)
	}
	all := append(tracetest.SpanStubs{roots[0]}, children[roots[0].SpanContext.SpanID()]...)
	if len(all) != len(spans) {
		t.Errorf("%d spans, of which %d are the connection or its children, want all", len(spans), len(all))
	}
	for i := range all {
		phases = append(phases, phaseOf(&all[i], roots[0].StartTime))
	}
	return roots[0], phases
}

func TestAConnectionIsATrace(t *testing.T) {
	provider, exporter := memory(t)
	tracing.New(provider, nil).ObserveConnection(servedOne())
	root, phases := one(t, exporter.GetSpans())
	if diff := gocmp.Diff([]phase{
		{Name: "connection", To: 10 * time.Second, Kind: trace.SpanKindServer},
		{Name: "held", To: time.Second, Kind: trace.SpanKindInternal},
		{Name: "dial", From: time.Second, To: 2 * time.Second, Kind: trace.SpanKindClient, Peer: dead.String(), Error: "refused"},
		{Name: "dial", From: 2 * time.Second, To: 3 * time.Second, Kind: trace.SpanKindClient, Peer: alive.String()},
		{Name: "proxied", From: 3 * time.Second, To: 10 * time.Second, Kind: trace.SpanKindInternal},
	}, phases); diff != "" {
		t.Errorf("spans (-want +got):\n%s", diff)
	}
	if !root.StartTime.Equal(began) {
		t.Errorf("began at %v, want %v", root.StartTime, began)
	}
	// The names are those of the semantic conventions, if they have one.
	want := []attribute.KeyValue{
		semconv.K8SNamespaceName("test"), semconv.K8SServiceName("web"), tracing.AttributePortName.String("http"),
		tracing.AttributeOutcome.String("served"),
		semconv.NetworkTransportTCP, semconv.NetworkTypeIPv6,
		tracing.AttributeSent.Int64(5), tracing.AttributeReceived.Int64(7),
		semconv.ClientAddress("2001:db8::c"), semconv.ClientPort(40000),
		semconv.ServerAddress("2001:db8::f"), semconv.ServerPort(80),
		tracing.AttributeEndpoint.String(alive.String()),
	}
	if diff := gocmp.Diff(want, root.Attributes, gocmp.Comparer(func(a, b attribute.KeyValue) bool { return a == b })); diff != "" {
		t.Errorf("attributes (-want +got):\n%s", diff)
	}
}

// A connection that was not served is an error, with the reason if there is one, and has
// spans only for the phases that it reached.
func TestWhatWasNotServedIsAnError(t *testing.T) {
	root := func(reason string) phase {
		return phase{Name: "connection", To: 10 * time.Second, Kind: trace.SpanKindServer, Error: reason}
	}
	for name, c := range map[string]struct {
		change func(*connection.Report)
		want   []phase
	}{
		"no endpoints": {
			func(r *connection.Report) { r.Err = errors.New("no endpoints") },
			[]phase{root("no endpoints"), {Name: "held", To: time.Second, Kind: trace.SpanKindInternal}},
		},
		"no reason": {
			func(r *connection.Report) { r.Held, r.Outcome = 0, connection.NotAdmitted },
			[]phase{root("not_admitted")},
		},
		"nobody answered": {
			func(r *connection.Report) {
				r.Held, r.Outcome, r.Err = 0, connection.Unreachable, errors.New("all are dead")
				r.Attempts = []connection.Attempt{{Endpoint: dead, Began: began, Duration: time.Second, Err: errors.New("refused")}}
			},
			[]phase{
				root("all are dead"), {Name: "dial", To: time.Second, Kind: trace.SpanKindClient, Peer: dead.String(), Error: "refused"},
			},
		},
		"cut": {
			func(r *connection.Report) {
				r.Held, r.Outcome, r.Err, r.Endpoint = 0, connection.Cut, errors.New("ended by the proxy"), alive
				r.Attempts = []connection.Attempt{{Endpoint: alive, Began: began, Duration: time.Second}}
			},
			[]phase{
				root("ended by the proxy"),
				{Name: "dial", To: time.Second, Kind: trace.SpanKindClient, Peer: alive.String()},
				{Name: "proxied", From: time.Second, To: 10 * time.Second, Kind: trace.SpanKindInternal},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			provider, exporter := memory(t)
			report := unserved()
			c.change(&report)
			tracing.New(provider, nil).ObserveConnection(report)
			root, phases := one(t, exporter.GetSpans())
			if diff := gocmp.Diff(c.want, phases); diff != "" {
				t.Errorf("spans (-want +got):\n%s", diff)
			}
			if got, _ := attr(&root, tracing.AttributeOutcome); got.AsString() != report.Outcome.String() {
				t.Errorf("outcome %q, want %v", got.AsString(), report.Outcome)
			}
			if _, ok := attr(&root, tracing.AttributeEndpoint); ok != report.Endpoint.IsValid() {
				t.Errorf("an endpoint is shown: %v, want %v", ok, report.Endpoint.IsValid())
			}
		})
	}
}

// Unknown addresses are omitted.
func TestAddressesThatNobodyKnowsAreLeftOut(t *testing.T) {
	provider, exporter := memory(t)
	report := servedOne()
	report.Client, report.Dialled = netip.AddrPort{}, netip.AddrPort{}
	tracing.New(provider, nil).ObserveConnection(report)
	root, _ := one(t, exporter.GetSpans())
	for _, key := range []attribute.Key{
		semconv.ClientAddressKey, semconv.ClientPortKey, semconv.ServerAddressKey, semconv.ServerPortKey,
	} {
		if got, ok := attr(&root, key); ok {
			t.Errorf("%s is %v, want it left out", key, got.String())
		}
	}
}

// listener is an Observer of connections, called by a Tracer.
type listener struct {
	recorder

	connections atomic.Int64
}

func (l *listener) ObserveConnection(connection.Report) { l.connections.Add(1) }

// The next Observer is called if it is a connection.Observer, with and without traces.
func TestTheNextObserverHearsOfConnections(t *testing.T) {
	provider, _ := memory(t)
	next := &listener{}
	tracing.New(provider, next).ObserveConnection(servedOne())
	tracing.New(noop.NewTracerProvider(), next).ObserveConnection(servedOne())
	if got := next.connections.Load(); got != 2 {
		t.Errorf("it heard of %d connections, want 2", got)
	}
	tracing.New(provider, &recorder{}).ObserveConnection(servedOne()) // recorder is no connection.Observer
}

// A connection that the sampler rejects is not recorded. The sampler gets the Service and
// the outcome.
func TestSamplingIsTheProvidersBusiness(t *testing.T) {
	exporter := tracetest.NewInMemoryExporter()
	sampler := &onlyFailures{}
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter), sdktrace.WithSampler(sdktrace.ParentBased(sampler)))
	defer provider.Shutdown(t.Context())
	tracer := tracing.New(provider, nil)
	for range 3 {
		tracer.ObserveConnection(servedOne())
	}
	tracer.ObserveConnection(unserved())
	_, phases := one(t, exporter.GetSpans())
	if len(phases) != 2 {
		t.Errorf("spans %v, want those of the connection that failed", phases)
	}
	want := []attribute.KeyValue{semconv.K8SNamespaceName("test"), semconv.K8SServiceName("web"), tracing.AttributePortName.String("http")}
	for _, a := range want {
		if !slices.Contains(sampler.seen, a) {
			t.Errorf("the sampler saw %v, want %v too", sampler.seen, a)
		}
	}
}

// onlyFailures is a sampler.
type onlyFailures struct{ seen []attribute.KeyValue }

func (s *onlyFailures) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	s.seen = p.Attributes
	if slices.Contains(p.Attributes, tracing.AttributeOutcome.String("served")) {
		return sdktrace.NeverSample().ShouldSample(p)
	}
	return sdktrace.AlwaysSample().ShouldSample(p)
}

func (s *onlyFailures) Description() string { return "onlyFailures" }

// A connection without traces allocates nothing. The cost of one that is not sampled does
// not depend on its report.
func TestAConnectionWithoutTracesIsFree(t *testing.T) {
	report, short := servedOne(), unserved()
	free := tracing.New(noop.NewTracerProvider(), nil)
	if got := testing.AllocsPerRun(100, func() { free.ObserveConnection(report) }); got != 0 {
		t.Errorf("%v allocations with a no-op provider, want 0", got)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.NeverSample()))
	defer provider.Shutdown(t.Context())
	unsampled := tracing.New(provider, nil)
	little := testing.AllocsPerRun(100, func() { unsampled.ObserveConnection(short) })
	much := testing.AllocsPerRun(100, func() { unsampled.ObserveConnection(report) })
	if much > little {
		t.Errorf("%v allocations for a connection with attempts, want %v as for one without", much, little)
	}
}
