package metrics_test

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/serviceplane/serviceplane/node/leastconnections"
	"github.com/serviceplane/serviceplane/node/metrics"
)

// The metrics of the policy least-connections exist once connections have been read.
func TestMetricsOfLeastConnections(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const prefix = "serviceplane_least_connections_"
	for _, s := range []metrics.Sources{{}, {LeastConnections: func() leastconnections.Readings { return leastconnections.Readings{} }}} {
		m.Watch(s)
		if families := scrape(t, registry); families[prefix+"service_ports"] != nil {
			t.Error("there is a metric of least-connections before a reading")
		}
	}
	m.Watch(metrics.Sources{LeastConnections: func() leastconnections.Readings {
		return leastconnections.Readings{Ports: 8, AtRandom: 1, Passed: 3, Failed: 2, Overrides: 3, Took: 4 * time.Second, Connections: 6}
	}})
	families := scrape(t, registry)
	for metric, want := range map[string]float64{"changes_total": 3, "duration_seconds": 4, "connections": 6} {
		if got := value(t, families, prefix+metric); got != want {
			t.Errorf("%s is %v, want %v", metric, got, want)
		}
	}
	for state, want := range map[string]float64{"balanced": 7, "at random": 1} {
		if got := value(t, families, prefix+"service_ports", "state="+state); got != want {
			t.Errorf("service ports that are %s: %v, want %v", state, got, want)
		}
	}
	for result, want := range map[string]float64{"passed": 3, "failed": 2} {
		if got := value(t, families, prefix+"readings_total", "result="+result); got != want {
			t.Errorf("readings that %s are %v, want %v", result, got, want)
		}
	}
}
