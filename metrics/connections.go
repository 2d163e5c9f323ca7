package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/connection"
	"github.com/serviceplane/serviceplane/desired"
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

func newConnections(o *Options) *connections {
	c := &connections{
		ended:    counter(serviceplane, "connections_total", "Ended connections, and ended flows of UDP clients.", labelFamily, labelProtocol, labelOutcome),
		bytes:    counter(serviceplane, "connection_bytes_total", "Bytes to and from endpoints, from the client's view, of ended connections.", labelFamily, labelProtocol, labelDirection),
		retries:  counter(serviceplane, "connection_retries_total", "Failed attempts to connect to an endpoint.", labelFamily, labelProtocol),
		duration: connectionHistogram("connection_duration_seconds", "Time from accepting a connection to its end."),
		held:     connectionHistogram("connection_held_seconds", "Time that connections waited for endpoints, without those that did not wait."),
	}
	if o.PerService {
		c.ofService = counter(serviceplane, "service_connections_total", "Ended connections to a service port.",
			labelNamespace, labelService, labelPort, labelProtocol, labelOutcome)
		c.bytesOfService = counter(serviceplane, "service_connection_bytes_total", "Bytes to and from the endpoints of a service port, of ended connections.",
			labelNamespace, labelService, labelPort, labelProtocol, labelDirection)
	}
	return c
}

func connectionHistogram(name, help string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: serviceplane, Name: name, Help: help, Buckets: durations}, []string{labelFamily, labelProtocol})
}

func (c *connections) collectors() []prometheus.Collector {
	all := []prometheus.Collector{c.ended, c.bytes, c.retries, c.duration, c.held}
	if c.ofService != nil {
		all = append(all, c.ofService, c.bytesOfService)
	}
	return all
}

// initSeries creates every series, except those of service ports.
func (c *connections) initSeries(families []v1.IPFamily) {
	for _, family := range families {
		for _, p := range []desired.Protocol{desired.TCP, desired.UDP} {
			f, protocol := string(family), p.String()
			for _, outcome := range connection.Outcomes() {
				c.ended.WithLabelValues(f, protocol, outcome.String())
			}
			c.bytes.WithLabelValues(f, protocol, sent)
			c.bytes.WithLabelValues(f, protocol, received)
			c.retries.WithLabelValues(f, protocol)
			c.duration.WithLabelValues(f, protocol)
			c.held.WithLabelValues(f, protocol)
		}
	}
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
	c.retries.WithLabelValues(family, protocol).Add(float64(failures(r.Attempts)))
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

// failures counts the failed attempts.
func failures(attempts []connection.Attempt) (n int) {
	for i := range attempts {
		if attempts[i].Err != nil {
			n++
		}
	}
	return n
}
