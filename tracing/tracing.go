package tracing

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/serviceplane/serviceplane/proxier"
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
