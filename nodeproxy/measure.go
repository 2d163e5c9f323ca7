package nodeproxy

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/serviceplane/serviceplane/endpointhealth"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/metrics"
	"github.com/serviceplane/serviceplane/proxier"
)

// measured holds what /metrics shows.
type measured struct {
	*metrics.Metrics

	registry *prometheus.Registry
	client   *metrics.Client
	sources  metrics.Sources
}

// measure returns the metrics of the mode, the client, the process and the build.
func (o *options) measure() (*measured, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), buildInfo())
	m, err := metrics.New(registry, metrics.Options{Mode: string(o.mode())})
	if err != nil {
		return nil, err
	}
	client, err := metrics.NewClient(registry)
	if err != nil {
		return nil, err
	}
	return &measured{Metrics: m, registry: registry, client: client}, nil
}

// watch shows the status of a proxy, the results of its canary, and of health checks.
func (m *measured) watch(o *options, p *testedProxy, health *endpointhealth.Checker, config proxier.Config) {
	m.sources = metrics.Sources{Status: p.Status}
	if p.canary != nil {
		m.sources.Canary = p.canary.Status
	}
	if health != nil {
		m.sources.EndpointHealth = health.Status
	}
	if o.countConnections || o.countTraffic {
		m.sources.Counts = p.Counts
	}
	if o.mode() == modeEBPF {
		m.sources.Sockets = o.engines.counts
		if len(o.ebpf.forwardDevices) > 0 {
			m.sources.Forwarded = o.engines.forwarded
		}
	}
	if o.mode() == modeIPTables { // the kernel counts
		packets := iptables.NewCounters(o.iptablesConfig(config))
		m.sources.LocalhostNodePorts, m.sources.Invalid = packets.LocalhostNodePorts, packets.Invalid
	}
	m.Watch(m.sources)
}
