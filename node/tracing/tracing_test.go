package tracing_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/node/tracing"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// memory keeps spans.
func memory(t *testing.T) (*sdktrace.TracerProvider, *tracetest.InMemoryExporter) {
	t.Helper()
	exporter := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))
	t.Cleanup(func() { _ = provider.Shutdown(context.WithoutCancel(t.Context())) })
	return provider, exporter
}

// recorder is an Observer, called by a Tracer.
type recorder struct{ reports atomic.Int64 }

func (r *recorder) ObserveSync(proxier.SyncReport) { r.reports.Add(1) }

// The traces come from the reports of a Provider.
func TestASyncIsATrace(t *testing.T) {
	provider, exporter := memory(t)
	next := &recorder{}
	p := start(t, proxier.Deps{Observer: tracing.New(provider, next), Health: proxier.NoHealth()})
	before := next.reports.Load()
	trigger := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	// No Sync in between, so that one sync has both.
	p.Tracker().Services.Update(nil, proxiertest.Service("test", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("", v1.ProtocolTCP, 80)))
	slice := proxiertest.Slice("test", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.0.1"))
	slice.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: trigger.Format(time.RFC3339Nano)}
	p.OnEndpointSliceAdd(slice)
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if next.reports.Load() == before {
		t.Error("the next Observer heard of no sync")
	}
	trace := traceWith(t, exporter.GetSpans(), tracing.AttributeTriggers.Int(1))
	wantTree(t, trace, "sync", "queued", "tracker", "resolve", "plan", "apply")
	root := trace["sync"]
	for _, want := range []attribute.KeyValue{
		tracing.AttributeFamily.String("IPv4"), tracing.AttributeFull.Bool(false), tracing.AttributeServicePorts.Int(1),
		tracing.AttributeChanges.Int(1),
	} {
		if !slices.Contains(root.Attributes, want) {
			t.Errorf("attributes %v, want %v", root.Attributes, want)
		}
	}
	if len(root.Events) != 1 || root.Events[0].Name != "trigger" || !root.Events[0].Time.Equal(trigger) {
		t.Errorf("events %v, want one trigger at %v", root.Events, trigger)
	}
	if root.Status.Code != codes.Unset {
		t.Errorf("status %v, want none", root.Status)
	}
}

// start runs a Provider of IPv4 and waits for its first sync.
func start(t *testing.T, deps proxier.Deps) *proxier.Proxier {
	t.Helper()
	p, err := proxier.New(
		proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}, Runner: runner.Options{MinInterval: 20 * time.Millisecond}},
		deps, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &proxiertest.RecordingEngine{}})
	if err != nil {
		t.Fatal(err)
	}
	proxiertest.Run(t, p)
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p
}

// traceWith returns the spans by name of the one trace whose root has an attribute.
func traceWith(t *testing.T, spans tracetest.SpanStubs, attr attribute.KeyValue) map[string]tracetest.SpanStub {
	t.Helper()
	for _, root := range spans {
		if root.Parent.IsValid() || !slices.Contains(root.Attributes, attr) {
			continue
		}
		byName := map[string]tracetest.SpanStub{}
		for _, s := range spans {
			if s.SpanContext.TraceID() == root.SpanContext.TraceID() {
				byName[s.Name] = s
			}
		}
		return byName
	}
	t.Fatalf("no trace with %v among %v", attr, spans)
	return nil
}

// wantTree checks the names of the spans, that all are children of the first one, and
// that they do not overlap.
func wantTree(t *testing.T, trace map[string]tracetest.SpanStub, names ...string) {
	t.Helper()
	if diff := cmp.Diff(slices.Sorted(slices.Values(names)), slices.Sorted(maps.Keys(trace))); diff != "" {
		t.Fatalf("spans (-want +got):\n%s", diff)
	}
	root := trace[names[0]]
	last := root.StartTime
	for _, name := range names[1:] {
		s := trace[name]
		if s.Parent.SpanID() != root.SpanContext.SpanID() {
			t.Errorf("%s is not a child of %s", name, names[0])
		}
		if s.StartTime.Before(last) || s.EndTime.Before(s.StartTime) || s.EndTime.After(root.EndTime) {
			t.Errorf("%s lasts from %v to %v, want it after %v and within %v to %v", name, s.StartTime, s.EndTime, last, root.StartTime, root.EndTime)
		}
		last = s.EndTime
	}
}

// The stages of a report become spans, and its error that of the trace.
func TestTheStagesOfAReport(t *testing.T) {
	provider, exporter := memory(t)
	tracer := tracing.New(provider, nil)
	started := time.Unix(1000, 0)
	report := proxier.SyncReport{
		Family: v1.IPv6Protocol, Full: true, Repair: true, Started: started, Duration: 6 * time.Second, Err: errors.New("the kernel is full"),
		Apply: proxier.ApplyReport{Writes: 3, Transactions: 2, Bytes: 100}, FlowsDeleted: 4, Failed: 5,
	}
	for i, name := range []string{
		proxier.StageTracker, proxier.StageResolve, proxier.StagePlan, proxier.StageApply, proxier.StageConntrack, proxier.StageHealth,
	} {
		report.Stages = append(report.Stages, proxier.Stage{Name: name, Started: started.Add(time.Duration(i) * time.Second), Duration: time.Second})
	}
	for i := range 300 {
		report.Triggers = append(report.Triggers, started.Add(-time.Duration(i)*time.Second))
	}
	tracer.ObserveSync(report)
	trace := traceWith(t, exporter.GetSpans(), tracing.AttributeFamily.String("IPv6"))
	wantTree(t, trace, "sync", "tracker", "resolve", "plan", "apply", "conntrack", "health")
	root := trace["sync"]
	if !root.StartTime.Equal(started) || !root.EndTime.Equal(started.Add(6*time.Second)) {
		t.Errorf("from %v to %v, want 6s from %v", root.StartTime, root.EndTime, started)
	}
	want := []attribute.KeyValue{
		tracing.AttributeFamily.String("IPv6"), tracing.AttributeFull.Bool(true), tracing.AttributeRepair.Bool(true),
		tracing.AttributeChanges.Int(0), tracing.AttributeServicePorts.Int(0), tracing.AttributeFailed.Int(5),
		tracing.AttributeWrites.Int(3), tracing.AttributeTransactions.Int(2), tracing.AttributeBytes.Int(100),
		tracing.AttributeFlowsDeleted.Int(4), tracing.AttributeTriggers.Int(300),
	}
	if diff := cmp.Diff(want, root.Attributes, cmp.Comparer(func(a, b attribute.KeyValue) bool { return a == b })); diff != "" {
		t.Errorf("attributes (-want +got):\n%s", diff)
	}
	if root.Status.Code != codes.Error || root.Status.Description != "the kernel is full" {
		t.Errorf("status %+v, want the error", root.Status)
	}
	triggers := slices.DeleteFunc(slices.Clone(root.Events), func(e sdktrace.Event) bool { return e.Name != "trigger" })
	if oldest := started.Add(-299 * time.Second); len(triggers) != 100 || !triggers[0].Time.Equal(oldest) {
		t.Errorf("%d triggers, want the 100 oldest ones, from %v", len(triggers), oldest)
	}
}

// A contested sync did nothing, and has no trace.
func TestASyncThatOnlyWaitedIsNoTrace(t *testing.T) {
	provider, exporter := memory(t)
	next := &recorder{}
	tracing.New(provider, next).ObserveSync(proxier.SyncReport{Err: proxier.ErrContested})
	if got := exporter.GetSpans(); len(got) != 0 || next.reports.Load() != 1 {
		t.Errorf("spans %v, %d reports, want none and 1", got, next.reports.Load())
	}
}
