package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/serviceplane/serviceplane/canary"
)

const labelResult = "result"

// canaryCollector collects the results of a canary at each scrape.
type canaryCollector struct {
	sources *sources

	passing, tests, lastSuccess, duration *prometheus.Desc
}

func newCanaryCollector(s *sources) *canaryCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(serviceplane, "canary", name), help, labels, nil)
	}
	return &canaryCollector{
		sources:     s,
		passing:     desc("passing", "1 while the canary's connections through the proxy's rules reach their endpoint, otherwise 0.", labelFamily),
		tests:       desc("tests_total", "Connections of the canary through the proxy's rules, by result: passed or failed.", labelFamily, labelResult),
		lastSuccess: desc("last_success_timestamp_seconds", "Time when the canary's last successful test ended; 0 if none did.", labelFamily),
		duration:    desc("duration_seconds", "Duration of the canary's last successful test.", labelFamily),
	}
}

// Describe implements prometheus.Collector.
func (c *canaryCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.passing, c.tests, c.lastSuccess, c.duration} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *canaryCollector) Collect(out chan<- prometheus.Metric) {
	status := c.sources.now().Canary
	if status == nil {
		return
	}
	for name, s := range status() {
		send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
			out <- prometheus.MustNewConstMetric(d, kind, value, append([]string{string(name)}, labels...)...)
		}
		passing, success := 0.0, 0.0
		if s.State == canary.StatePassing {
			passing = 1
		}
		if !s.LastSuccess.IsZero() {
			success = seconds(s.LastSuccess)
		}
		send(c.passing, prometheus.GaugeValue, passing)
		send(c.tests, prometheus.CounterValue, float64(s.Passed), "passed")
		send(c.tests, prometheus.CounterValue, float64(s.Failed), "failed")
		send(c.lastSuccess, prometheus.GaugeValue, success)
		send(c.duration, prometheus.GaugeValue, s.Took.Seconds())
	}
}
