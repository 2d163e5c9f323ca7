package metrics_test

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/node/metrics"
)

// The metrics of health checks exist with Sources.EndpointHealth.
func TestMetricsOfHealthChecks(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const prefix = "serviceplane_endpoint_health_"
	if families := scrape(t, registry); families[prefix+"endpoints"] != nil {
		t.Error("there is a metric of health checks without Sources.EndpointHealth")
	}
	m.Watch(metrics.Sources{EndpointHealth: func() endpointhealth.Summary {
		return endpointhealth.Summary{
			Checks: 100, Passed: 1, Failures: 2, Untested: 3, Ejections: 4, Returns: 5, Syncs: 6,
			Endpoints: 7, Failing: 8, Ejected: 9, Kept: 10, Starting: 11, Refused: 12, Late: 13,
		}
	}})
	families := scrape(t, registry)
	for _, c := range []struct {
		metric, label string
		want          float64
	}{
		{"checks_total", "result=passed", 1},
		{"checks_total", "result=failed", 2},
		{"checks_total", "result=untested", 3},
		{"changes_total", "change=ejected", 4},
		{"changes_total", "change=returned", 5},
		{"syncs_total", "", 6},
		{"endpoints", "state=checked", 7},
		{"endpoints", "state=failing", 8},
		{"service_endpoints", "state=ejected", 9},
		{"service_endpoints", "state=kept", 10},
		{"service_endpoints", "state=starting", 11},
		{"refused", "", 12},
		{"late", "", 13},
	} {
		var labels []string
		if c.label != "" {
			labels = []string{c.label}
		}
		if got := value(t, families, prefix+c.metric, labels...); got != c.want {
			t.Errorf("%s{%s} is %v, want %v", c.metric, c.label, got, c.want)
		}
	}
}
