package tracing_test

import (
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/serviceplane/serviceplane/node/tracing"
)

// BenchmarkUnsampledConnection measures the cost of a connection that is not sampled.
// Budget: 5 µs.
func BenchmarkUnsampledConnection(b *testing.B) {
	provider := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.NeverSample()))
	defer provider.Shutdown(b.Context())
	tracer, report := tracing.New(provider, nil), servedOne()
	b.ReportAllocs()
	for b.Loop() {
		tracer.ObserveConnection(report)
	}
}
