package tracing

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/serviceplane/serviceplane/connection"
)

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

// Names of OpenTelemetry's semantic conventions, version 1.43.
const (
	keyNamespace     = attribute.Key("k8s.namespace.name")
	keyService       = attribute.Key("k8s.service.name")
	keyTransport     = attribute.Key("network.transport")
	keyFamily        = attribute.Key("network.type")
	keyClientAddress = attribute.Key("client.address")
	keyClientPort    = attribute.Key("client.port")
	keyServerAddress = attribute.Key("server.address")
	keyServerPort    = attribute.Key("server.port")
	keyPeerAddress   = attribute.Key("network.peer.address")
	keyPeerPort      = attribute.Key("network.peer.port")
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
		trace.WithAttributes(addressAttributes(keyPeerAddress, keyPeerPort, a.Endpoint)...))
	if a.Err != nil {
		fail(span, a.Err, ended)
	}
	span.End(trace.WithTimestamp(ended))
}

// forSampler returns the attributes that a sampler may decide by: only cheap ones, as it
// may reject thousands of connections.
func forSampler(r *connection.Report) []attribute.KeyValue {
	return []attribute.KeyValue{
		keyNamespace.String(r.Name.Namespace),
		keyService.String(r.Name.Name),
		AttributePortName.String(r.Name.Port),
		AttributeOutcome.String(r.Outcome.String()),
	}
}

// details returns the other attributes of a connection.
func details(r *connection.Report) []attribute.KeyValue {
	all := []attribute.KeyValue{
		keyTransport.String(strings.ToLower(r.Protocol.String())),
		keyFamily.String(strings.ToLower(string(r.Family))),
		AttributeSent.Int64(r.Sent),
		AttributeReceived.Int64(r.Received),
	}
	all = append(all, addressAttributes(keyClientAddress, keyClientPort, r.Client)...)
	all = append(all, addressAttributes(keyServerAddress, keyServerPort, r.Dialled)...)
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
