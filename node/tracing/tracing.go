package tracing

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// ScopeName is the instrumentation scope of all spans.
const ScopeName = "github.com/serviceplane/serviceplane"

// Names of the attributes of the span of a sync.
const (
	AttributeFamily       = attribute.Key("serviceplane.ip_family")
	AttributeFull         = attribute.Key("serviceplane.full")
	AttributeRepair       = attribute.Key("serviceplane.repair")
	AttributeChanges      = attribute.Key("serviceplane.changes")
	AttributeServicePorts = attribute.Key("serviceplane.service_ports")
	AttributeFailed       = attribute.Key("serviceplane.service_ports_failed")
	AttributeWrites       = attribute.Key("serviceplane.kernel.writes")
	AttributeTransactions = attribute.Key("serviceplane.kernel.transactions")
	AttributeBytes        = attribute.Key("serviceplane.kernel.bytes")
	AttributeFlowsDeleted = attribute.Key("serviceplane.flows_deleted")
	// AttributeTriggers is the number of trigger times, which are events of the span.
	AttributeTriggers = attribute.Key("serviceplane.triggers")
)

// maxTriggers limits the events: OpenTelemetry drops those beyond 128 by default.
const maxTriggers = 100

// Tracer creates traces of syncs and connections. It implements proxier.Observer and
// connection.Observer. Several goroutines may use it at once.
type Tracer struct {
	tracer trace.Tracer
	silent bool // the provider records nothing
	next   proxier.Observer
}

var _ proxier.Observer = (*Tracer)(nil)

// New returns a Tracer. A Provider has only one Observer, so the Tracer calls next, if
// it is not nil, for every sync, and for every connection if next is a
// connection.Observer.
func New(provider trace.TracerProvider, next proxier.Observer) *Tracer {
	tracer := provider.Tracer(ScopeName)
	_, silent := tracer.(noop.Tracer)
	return &Tracer{tracer: tracer, silent: silent, next: next}
}

// ObserveSync implements proxier.Observer.
func (t *Tracer) ObserveSync(r proxier.SyncReport) {
	if t.next != nil {
		t.next.ObserveSync(r)
	}
	if t.silent || errors.Is(r.Err, proxier.ErrContested) { // a contested sync did nothing
		return
	}
	began := r.Started
	if !r.Queued.IsZero() && r.Queued.Before(began) {
		began = r.Queued
	}
	ctx, span := t.tracer.Start(context.Background(), "sync", //nolint:forbidigo // the root of a trace; nothing is cancelled by it
		trace.WithNewRoot(), trace.WithTimestamp(began), trace.WithAttributes(attributes(&r)...))
	if began.Before(r.Started) {
		t.stage(ctx, "queued", began, r.Started)
	}
	for _, s := range r.Stages {
		t.stage(ctx, s.Name, s.Started, s.Started.Add(s.Duration))
	}
	for _, at := range oldest(r.Triggers) { // when the control plane saw the cause of a change
		span.AddEvent("trigger", trace.WithTimestamp(at))
	}
	ended := r.Started.Add(r.Duration)
	if r.Err != nil {
		fail(span, r.Err, ended)
	}
	span.End(trace.WithTimestamp(ended))
}

// fail records an error in a span.
func fail(span trace.Span, err error, at time.Time) {
	span.RecordError(err, trace.WithTimestamp(at))
	span.SetStatus(codes.Error, err.Error())
}

func (t *Tracer) stage(ctx context.Context, name string, began, ended time.Time) {
	_, span := t.tracer.Start(ctx, name, trace.WithTimestamp(began))
	span.End(trace.WithTimestamp(ended))
}

// oldest returns the oldest triggers, which have the highest latency.
func oldest(triggers []time.Time) []time.Time {
	sorted := slices.SortedFunc(slices.Values(triggers), time.Time.Compare)
	return sorted[:min(len(sorted), maxTriggers)]
}

func attributes(r *proxier.SyncReport) []attribute.KeyValue {
	return []attribute.KeyValue{
		AttributeFamily.String(string(r.Family)),
		AttributeFull.Bool(r.Full),
		AttributeRepair.Bool(r.Repair),
		AttributeChanges.Int(r.Changes),
		AttributeServicePorts.Int(r.ServicePorts),
		AttributeFailed.Int(r.Failed),
		AttributeWrites.Int(r.Apply.Writes),
		AttributeTransactions.Int(r.Apply.Transactions),
		AttributeBytes.Int(r.Apply.Bytes),
		AttributeFlowsDeleted.Int(r.FlowsDeleted),
		AttributeTriggers.Int(len(r.Triggers)),
	}
}

// Names of the attributes of a connection's span. A sampler sees AttributePortName,
// AttributeOutcome, and the namespace and name of the Service.
const (
	// AttributePortName is the name of the Service's port, empty if it has none.
	AttributePortName = attribute.Key("serviceplane.port_name")
	// AttributeOutcome is a connection.Outcome.
	AttributeOutcome = attribute.Key("serviceplane.outcome")
	// AttributeEndpoint is the endpoint that served the connection; absent if none did.
	AttributeEndpoint = attribute.Key("serviceplane.endpoint")
	// AttributeSent and AttributeReceived count the bytes to and from the endpoint.
	AttributeSent     = attribute.Key("serviceplane.bytes.sent")
	AttributeReceived = attribute.Key("serviceplane.bytes.received")
)

var _ connection.Observer = (*Tracer)(nil)

// ObserveConnection implements connection.Observer. It also calls the next Observer, if
// that is a connection.Observer. A connection that is not sampled costs little.
func (t *Tracer) ObserveConnection(r connection.Report) {
	if next, ok := t.next.(connection.Observer); ok {
		next.ObserveConnection(r)
	}
	if t.silent {
		return
	}
	ctx, span := t.tracer.Start(context.Background(), "connection", //nolint:forbidigo // the root of a trace; nothing is cancelled by it
		trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(r.Began),
		trace.WithAttributes(forSampler(&r)...))
	ended := r.Began.Add(r.Duration)
	if span.IsRecording() {
		span.SetAttributes(details(&r)...)
		t.phases(ctx, &r, ended)
		if r.Outcome != connection.Served {
			fail(span, cmp.Or(r.Err, errors.New(r.Outcome.String())), ended)
		}
	}
	span.End(trace.WithTimestamp(ended))
}

// phases creates the child spans of a connection.
func (t *Tracer) phases(ctx context.Context, r *connection.Report, ended time.Time) {
	if r.Held > 0 {
		t.stage(ctx, "held", r.Began, r.Began.Add(r.Held))
	}
	for i := range r.Attempts {
		t.dial(ctx, &r.Attempts[i])
	}
	if len(r.Attempts) == 0 {
		return
	}
	if last := r.Attempts[len(r.Attempts)-1]; last.Err == nil {
		t.stage(ctx, "proxied", last.Began.Add(last.Duration), ended)
	}
}

func (t *Tracer) dial(ctx context.Context, a *connection.Attempt) {
	ended := a.Began.Add(a.Duration)
	_, span := t.tracer.Start(ctx, "dial", trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(a.Began),
		trace.WithAttributes(addressAttributes(semconv.NetworkPeerAddressKey, semconv.NetworkPeerPortKey, a.Endpoint)...))
	if a.Err != nil {
		fail(span, a.Err, ended)
	}
	span.End(trace.WithTimestamp(ended))
}

// forSampler returns the attributes that a sampler may decide by: only cheap ones, as it
// may reject thousands of connections.
func forSampler(r *connection.Report) []attribute.KeyValue {
	return []attribute.KeyValue{
		semconv.K8SNamespaceNameKey.String(r.Name.Namespace),
		semconv.K8SServiceNameKey.String(r.Name.Name),
		AttributePortName.String(r.Name.Port),
		AttributeOutcome.String(r.Outcome.String()),
	}
}

// details returns the other attributes of a connection.
func details(r *connection.Report) []attribute.KeyValue {
	all := []attribute.KeyValue{
		semconv.NetworkTransportKey.String(strings.ToLower(r.Protocol.String())),
		semconv.NetworkTypeKey.String(strings.ToLower(string(r.Family))),
		AttributeSent.Int64(r.Sent),
		AttributeReceived.Int64(r.Received),
	}
	all = append(all, addressAttributes(semconv.ClientAddressKey, semconv.ClientPortKey, r.Client)...)
	all = append(all, addressAttributes(semconv.ServerAddressKey, semconv.ServerPortKey, r.Dialled)...)
	if r.Endpoint.IsValid() {
		all = append(all, AttributeEndpoint.String(r.Endpoint.String()))
	}
	return all
}

// addressAttributes returns the attributes of an address and port; none if it is invalid.
func addressAttributes(address, port attribute.Key, at netip.AddrPort) []attribute.KeyValue {
	if !at.IsValid() {
		return nil
	}
	return []attribute.KeyValue{address.String(at.Addr().String()), port.Int(int(at.Port()))}
}
