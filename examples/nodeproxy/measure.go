package main

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
	return &measured{m, registry, client}, nil
}

// watch shows the status of a proxy, the results of its canary, and of health checks.
func (m *measured) watch(o *options, p *testedProxy, health *endpointhealth.Checker, config proxier.Config) {
	m.Watch(p.Status)
	if p.canary != nil {
		m.WatchCanary(p.canary.Status)
	}
	if health != nil {
		m.WatchEndpointHealth(health.Status)
	}
	if o.countConnections || o.countTraffic {
		m.WatchCounts(p.Counts, 0)
	}
	if o.mode() == modeEBPF {
		m.WatchSockets(o.engines.counts)
		if len(o.ebpf.forwardDevices) > 0 {
			m.WatchForward(o.engines.forwarded)
		}
	}
	if o.mode() == modeIPTables { // the kernel counts
		packets := iptables.NewCounters(o.iptablesConfig(config))
		m.WatchPackets(packets.LocalhostNodePorts, packets.Invalid)
	}
}
