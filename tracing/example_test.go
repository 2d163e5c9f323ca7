package tracing_test

import (
	"context"
	"errors"
	"fmt"
	"slices"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/tracing"
)

// sampler wants every sync and every connection that was not served, and a share of
// the others.
type sampler struct{ served sdktrace.Sampler }

func (s sampler) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	if slices.Contains(p.Attributes, tracing.AttributeOutcome.String(proxier.OutcomeServed.String())) {
		return s.served.ShouldSample(p)
	}
	return sdktrace.AlwaysSample().ShouldSample(p)
}

func (s sampler) Description() string { return "sampler of " + s.served.Description() }

// A sampler sees the outcome of a connection.
func ExampleTracer_ObserveConnection() {
	exporter := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter),
		sdktrace.WithSampler(sdktrace.ParentBased(sampler{served: sdktrace.TraceIDRatioBased(0)})))
	tracer := tracing.New(provider, nil)
	tracer.ObserveSync(proxier.SyncReport{})
	tracer.ObserveConnection(proxier.ConnectionReport{Outcome: proxier.OutcomeServed})
	tracer.ObserveConnection(proxier.ConnectionReport{Outcome: proxier.OutcomeUnreachable, Err: errors.New("all endpoints are dead")})
	for _, span := range exporter.GetSpans() {
		fmt.Printf("%s %q\n", span.Name, span.Status.Description)
	}
	_ = provider.Shutdown(context.Background())
	// Output:
	// sync ""
	// connection "all endpoints are dead"
}
