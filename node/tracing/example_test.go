package tracing_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"slices"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/tracing"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/userspace"
)

// Traces of syncs, for a collector.
func ExampleNew() {
	var config nftables.Config
	var exporter sdktrace.SpanExporter // such as otlptracehttp.New returns
	var measured proxier.Observer      // another one, such as metrics.Metrics, or nil
	ctx := context.Background()

	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter))
	p, err := nftables.New(config, proxier.Deps{Observer: tracing.New(provider, measured)})
	if err != nil {
		log.Panic(err)
	}

	if err := p.Run(ctx); err != nil {
		log.Panic(err)
	}
	if err := provider.Shutdown(ctx); err != nil { // exports the last traces
		log.Panic(err)
	}
}

// Traces of syncs and of connections, one in a hundred.
func ExampleNew_connections() {
	var config userspace.Config
	var exporter sdktrace.SpanExporter
	var measured proxier.Observer

	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(0.01))),
	)
	p, err := userspace.New(config, proxier.Deps{Observer: tracing.New(provider, measured)})
	if err != nil {
		log.Panic(err)
	}

	if err := p.Run(context.Background()); err != nil {
		log.Panic(err)
	}
}

// sampler samples every sync and every connection that was not served, and a share of
// the others.
type sampler struct{ served sdktrace.Sampler }

func (s sampler) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	if slices.Contains(p.Attributes, tracing.AttributeOutcome.String(connection.Served.String())) {
		return s.served.ShouldSample(p)
	}
	return sdktrace.AlwaysSample().ShouldSample(p)
}

func (s sampler) Description() string { return "sampler of " + s.served.Description() }

// A sampler sees the outcome of a connection.
func ExampleTracer_ObserveConnection() {
	exporter := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithSyncer(exporter),
		sdktrace.WithSampler(sdktrace.ParentBased(sampler{served: sdktrace.TraceIDRatioBased(0)})),
	)
	tracer := tracing.New(provider, nil)
	tracer.ObserveSync(proxier.SyncReport{})
	tracer.ObserveConnection(connection.Report{Outcome: connection.Served})
	tracer.ObserveConnection(connection.Report{Outcome: connection.Unreachable, Err: errors.New("all endpoints are dead")})
	for _, span := range exporter.GetSpans() {
		fmt.Printf("%s %q\n", span.Name, span.Status.Description)
	}
	_ = provider.Shutdown(context.Background())
	// Output:
	// sync ""
	// connection "all endpoints are dead"
}
