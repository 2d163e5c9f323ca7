package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/serviceplane/serviceplane/proxier/connection"
)

const (
	// Values of labelDirection, from the client's view.
	sent     = "sent"
	received = "received"
)

// connections are the collectors for connections, which only the userspace engine
// reports.
type connections struct {
	ended, bytes, retries *prometheus.CounterVec
	duration, held        *prometheus.HistogramVec

	ofService, bytesOfService *prometheus.CounterVec // nil unless Options.PerService
}

func newConnections(of *collectors, perService bool) *connections {
	c := &connections{
		ended:    of.counter(serviceplane, "connections_total", "Ended connections, and ended flows of UDP clients.", labelFamily, labelProtocol, labelOutcome),
		bytes:    of.counter(serviceplane, "connection_bytes_total", "Bytes to and from endpoints, from the client's view, of ended connections.", labelFamily, labelProtocol, labelDirection),
		retries:  of.counter(serviceplane, "connection_retries_total", "Failed attempts to connect to an endpoint.", labelFamily, labelProtocol),
		duration: of.histogram(serviceplane, "connection_duration_seconds", "Time from accepting a connection to its end.", durations, labelFamily, labelProtocol),
		held:     of.histogram(serviceplane, "connection_held_seconds", "Time that connections waited for endpoints, without those that did not wait.", durations, labelFamily, labelProtocol),
	}
	if perService {
		c.ofService = of.counter(serviceplane, "service_connections_total", "Ended connections to a service port.",
			labelNamespace, labelService, labelPort, labelProtocol, labelOutcome)
		c.bytesOfService = of.counter(serviceplane, "service_connection_bytes_total", "Bytes to and from the endpoints of a service port, of ended connections.",
			labelNamespace, labelService, labelPort, labelProtocol, labelDirection)
	}
	return c
}

var _ connection.Observer = (*Metrics)(nil)

// ObserveConnection implements connection.Observer. Without Options.Mode
// "userspace" it counts nothing.
func (m *Metrics) ObserveConnection(r connection.Report) {
	c := m.connections
	if c == nil {
		return
	}
	family, protocol, outcome := string(r.Family), r.Protocol.String(), r.Outcome.String()
	c.ended.WithLabelValues(family, protocol, outcome).Inc()
	c.bytes.WithLabelValues(family, protocol, sent).Add(float64(r.Sent))
	c.bytes.WithLabelValues(family, protocol, received).Add(float64(r.Received))
	c.duration.WithLabelValues(family, protocol).Observe(r.Duration.Seconds())
	for i := range r.Attempts {
		if r.Attempts[i].Err != nil {
			c.retries.WithLabelValues(family, protocol).Inc()
		}
	}
	if r.Held > 0 {
		c.held.WithLabelValues(family, protocol).Observe(r.Held.Seconds())
	}
	if c.ofService == nil {
		return
	}
	name := r.Name
	c.ofService.WithLabelValues(name.Namespace, name.Name, name.Port, protocol, outcome).Inc()
	c.bytesOfService.WithLabelValues(name.Namespace, name.Name, name.Port, protocol, sent).Add(float64(r.Sent))
	c.bytesOfService.WithLabelValues(name.Namespace, name.Name, name.Port, protocol, received).Add(float64(r.Received))
}
