package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/serviceplane/serviceplane/endpointhealth"
)

const labelState = "state"

// healthCollector collects the results of health checks at each scrape.
type healthCollector struct {
	sources *sources

	endpoints, unusual, checks, changes, syncs, refused, late *prometheus.Desc
}

func newHealthCollector(s *sources) *healthCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(serviceplane, "endpoint_health", name), help, labels, nil)
	}
	return &healthCollector{
		sources:   s,
		endpoints: desc("endpoints", "Endpoints whose health is checked, each counted once for all service ports that agree how; state failing is a part of state checked.", labelState),
		unusual:   desc("service_endpoints", "Endpoints of service ports that get no connections (ejected), that fail and get them because too many others are ejected (kept), or that do not get their whole share yet (starting).", labelState),
		checks:    desc("checks_total", "Health checks that ended, by result: passed, failed, or untested for a reason on this node.", labelResult),
		changes:   desc("changes_total", "Endpoints of service ports that health checks ejected, or that returned.", "change"),
		syncs:     desc("syncs_total", "Syncs that health checks requested."),
		refused:   desc("refused", "Service ports that are not checked because what chooses their health check is invalid."),
		late:      desc("late", "Health checks that are due and wait for others to end."),
	}
}

// Describe implements prometheus.Collector.
func (c *healthCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.endpoints, c.unusual, c.checks, c.changes, c.syncs, c.refused, c.late} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *healthCollector) Collect(out chan<- prometheus.Metric) {
	status := c.sources.now().EndpointHealth
	if status == nil {
		return
	}
	s := status()
	gauge := func(d *prometheus.Desc, value int, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value), labels...)
	}
	counter := func(d *prometheus.Desc, value uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value), labels...)
	}
	gauge(c.endpoints, s.Endpoints, "checked")
	gauge(c.endpoints, s.Failing, "failing")
	gauge(c.unusual, s.Ejected, endpointhealth.StateEjected.String())
	gauge(c.unusual, s.Kept, endpointhealth.StateKept.String())
	gauge(c.unusual, s.Starting, endpointhealth.StateStarting.String())
	counter(c.checks, s.Passed, "passed")
	counter(c.checks, s.Failures, "failed")
	counter(c.checks, s.Untested, "untested")
	counter(c.changes, s.Ejections, "ejected")
	counter(c.changes, s.Returns, "returned")
	counter(c.syncs, s.Syncs)
	gauge(c.refused, s.Refused)
	gauge(c.late, s.Late)
}
