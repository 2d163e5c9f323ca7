package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/node/tracing"
	"github.com/serviceplane/serviceplane/proxier"
)

// flushTimeout bounds the export of the last traces.
const flushTimeout = 2 * time.Second

// traced adds traces to an Observer, if the flags name a collector. end exports the last
// ones.
func (o *options) traced(ctx context.Context, node string, next proxier.Observer, log *zap.Logger) (observer proxier.Observer, end func(), err error) {
	if o.traceEndpoint == "" {
		return next, func() {}, nil
	}
	endpoint, err := traceURL(o.traceEndpoint)
	if err != nil {
		return nil, nil, err
	}
	exporter, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(endpoint))
	if err != nil {
		return nil, nil, fmt.Errorf("export traces: %w", err)
	}
	// The error handler is global in the library. Only a program may set it.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("traces are not exported", zap.Error(err)) }))
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(resource.NewSchemaless(
		attribute.String("service.name", "nodeproxy"), attribute.String("k8s.node.name", node))))
	return tracing.New(provider, next), func() {
		last, stop := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
		defer stop()
		if err := provider.Shutdown(last); err != nil {
			log.Warn("the last traces are not exported", zap.Error(err))
		}
	}, nil
}

// traceURL adds the path of OTLP to the URL of a collector without one.
func traceURL(text string) (string, error) {
	u, err := url.Parse(text)
	if err != nil {
		return "", err
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return "", errors.New("not the URL of a collector")
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/v1/traces"
	}
	return u.String(), nil
}
