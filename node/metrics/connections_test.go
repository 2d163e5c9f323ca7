package metrics_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// measure returns Metrics and their registry.
func measure(t *testing.T, o metrics.Options) (*metrics.Metrics, *prometheus.Registry) {
	t.Helper()
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, o)
	if err != nil {
		t.Fatal(err)
	}
	return m, registry
}

// connectionTo reports a served TCP connection over IPv4.
func connectionTo(service string) connection.Report {
	return connection.Report{
		Name: changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "test", Name: service}, Port: "http", Protocol: v1.ProtocolTCP,
		},
		Family: v1.IPv4Protocol, Protocol: desired.TCP, Outcome: connection.Served,
		Duration: 3 * time.Second, Sent: 5, Received: 7,
	}
}

// series counts the series of each metric, and all. It does not parse the text, which
// takes long with many series.
func series(t *testing.T, registry *prometheus.Registry) (byName map[string]int, total int) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	byName = map[string]int{}
	for _, f := range families {
		byName[f.GetName()] = len(f.GetMetric())
		total += len(f.GetMetric())
	}
	return byName, total
}

// ofConnections returns only the metrics of connections.
func ofConnections(families map[string]*dto.MetricFamily) (names []string) {
	for name := range families {
		if strings.Contains(name, "connection") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// labelSets returns the label values of all series of a metric, sorted by label.
func labelSets(f *dto.MetricFamily) (names string, values []string) {
	for _, m := range f.GetMetric() {
		var n, v []string
		for _, l := range m.GetLabel() {
			n, v = append(n, l.GetName()), append(v, l.GetValue())
		}
		names, values = strings.Join(n, ","), append(values, strings.Join(v, ","))
	}
	slices.Sort(values)
	return names, values
}

// In mode userspace, all series exist from the first scrape on.
func TestTheMetricsOfConnections(t *testing.T) {
	_, registry := measure(t, metrics.Options{Mode: "userspace"})
	families := scrape(t, registry)
	var ended, bytes, plain []string
	for _, family := range []string{"IPv4", "IPv6"} {
		for _, protocol := range []string{"TCP", "UDP"} {
			plain = append(plain, family+","+protocol)
			for _, direction := range []string{"received", "sent"} {
				bytes = append(bytes, direction+","+family+","+protocol)
			}
			for _, outcome := range connection.Outcomes() {
				ended = append(ended, family+","+outcome.String()+","+protocol)
			}
		}
	}
	want := map[string]struct {
		kind   dto.MetricType
		labels string
		series []string
	}{
		"serviceplane_connections_total":           {dto.MetricType_COUNTER, "ip_family,outcome,protocol", ended},
		"serviceplane_connection_bytes_total":      {dto.MetricType_COUNTER, "direction,ip_family,protocol", bytes},
		"serviceplane_connection_retries_total":    {dto.MetricType_COUNTER, "ip_family,protocol", plain},
		"serviceplane_connection_duration_seconds": {dto.MetricType_HISTOGRAM, "ip_family,protocol", plain},
		"serviceplane_connection_held_seconds":     {dto.MetricType_HISTOGRAM, "ip_family,protocol", plain},
	}
	if got := ofConnections(families); len(got) != len(want) {
		t.Errorf("metrics %v, want %d", got, len(want))
	}
	for name, w := range want {
		if got := families[name].GetType(); got != w.kind {
			t.Errorf("%s is a %v, want a %v", name, got, w.kind)
		}
		names, values := labelSets(families[name])
		slices.Sort(w.series)
		if diff := cmp.Diff(w.series, values); names != w.labels || diff != "" {
			t.Errorf("%s{%s}, want {%s}; series (-want +got):\n%s", name, names, w.labels, diff)
		}
	}
	held := families["serviceplane_connection_held_seconds"].GetMetric()[0].GetHistogram().GetBucket()
	if got := held[len(held)-2].GetUpperBound(); got != 3600 {
		t.Errorf("the last bucket but infinity is %v, want 3600", got)
	}
}

// Other modes have no metrics of connections, and ignore reports. An unknown mode has the
// metrics of all modes (MET-30).
func TestConnectionsAreOfUserspaceOnly(t *testing.T) {
	for _, mode := range []string{"", "unknown", "nftables", "iptables", "ipvs", "ebpf"} {
		m, registry := measure(t, metrics.Options{Mode: mode, PerService: true})
		m.ObserveConnection(connectionTo("web"))
		if got := ofConnections(scrape(t, registry)); len(got) != 0 {
			t.Errorf("mode %q has %v, want none", mode, got)
		}
	}
}

// Connections are counted by IP family, protocol and outcome.
func TestConnectionsAreMeasured(t *testing.T) {
	m, registry := measure(t, metrics.Options{Mode: "userspace"})
	m.ObserveConnection(connectionTo("web"))
	retried := connectionTo("other")
	dead := errors.New("dead")
	retried.Held, retried.Attempts = 2*time.Second, []connection.Attempt{{Err: dead}, {Err: dead}, {}}
	m.ObserveConnection(retried)
	for i, outcome := range connection.Outcomes() {
		for range i {
			m.ObserveConnection(connection.Report{Family: v1.IPv6Protocol, Protocol: desired.UDP, Outcome: outcome})
		}
	}
	families := scrape(t, registry)
	tcp4, udp6 := []string{"ip_family=IPv4", "protocol=TCP"}, []string{"ip_family=IPv6", "protocol=UDP"}
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"connections_total", append(tcp4, "outcome=served"), 2},
		{"connections_total", append(tcp4, "outcome=cut"), 0},
		{"connections_total", append(udp6, "outcome=served"), 0},
		{"connections_total", append(udp6, "outcome=cut"), 1},
		{"connections_total", append(udp6, "outcome=not_admitted"), 2},
		{"connections_total", append(udp6, "outcome=no_endpoints"), 3},
		{"connections_total", append(udp6, "outcome=unreachable"), 4},
		{"connections_total", append(udp6, "outcome=too_many"), 5},
		{"connection_bytes_total", append(tcp4, "direction=sent"), 10},
		{"connection_bytes_total", append(tcp4, "direction=received"), 14},
		{"connection_bytes_total", append(udp6, "direction=sent"), 0},
		{"connection_retries_total", tcp4, 2},
		{"connection_retries_total", udp6, 0},
		{"connection_duration_seconds", tcp4, 2},
		{"connection_duration_seconds", udp6, 15},
		{"connection_held_seconds", tcp4, 1},
		{"connection_held_seconds", udp6, 0},
	} {
		if got := value(t, families, "serviceplane_"+c.name, c.labels...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
	for name, want := range map[string]float64{"duration": 6, "held": 2} {
		if got := sum(families["serviceplane_connection_"+name+"_seconds"], tcp4); got != want {
			t.Errorf("%s of TCP over IPv4 is %vs in all, want %vs", name, got, want)
		}
	}
}

// sum returns the sum of a histogram's observations.
func sum(f *dto.MetricFamily, labels []string) float64 {
	for _, m := range f.GetMetric() {
		if hasAll(m, labels) {
			return m.GetHistogram().GetSampleSum()
		}
	}
	return math.NaN()
}

// With PerService, there are up to eight series for each service port.
func TestConnectionsToAnyNumberOfServicesAddNoSeries(t *testing.T) {
	const services = 2000
	for name, c := range map[string]struct {
		options metrics.Options
		added   int
	}{
		"by default":  {metrics.Options{Mode: "userspace"}, 0},
		"per service": {metrics.Options{Mode: "userspace", PerService: true}, services * 8},
	} {
		t.Run(name, func(t *testing.T) {
			m, registry := measure(t, c.options)
			_, before := series(t, registry)
			for i := range services {
				for _, outcome := range connection.Outcomes() {
					r := connectionTo(fmt.Sprintf("web-%d", i))
					r.Outcome, r.Held, r.Attempts = outcome, time.Second, []connection.Attempt{{Err: errors.New("dead")}}
					m.ObserveConnection(r)
				}
			}
			byName, after := series(t, registry)
			if after-before != c.added {
				t.Errorf("%d series after %d, want %d more: %v", after, before, c.added, byName)
			}
			if before > 100 {
				t.Errorf("%d series at the start, want 100 at most", before)
			}
		})
	}
}

// Connections count for the service port that the client dialled.
func TestConnectionsPerService(t *testing.T) {
	m, registry := measure(t, metrics.Options{Mode: "userspace", PerService: true})
	m.ObserveConnection(connectionTo("web"))
	m.ObserveConnection(connectionTo("web"))
	v6 := connectionTo("web")
	v6.Family = v1.IPv6Protocol
	m.ObserveConnection(v6)
	cut := connectionTo("other")
	cut.Outcome, cut.Sent = connection.Cut, 100
	m.ObserveConnection(cut)
	families := scrape(t, registry)
	labels := func(service string, more ...string) []string {
		return append([]string{"namespace=test", "service=" + service, "port=http", "protocol=TCP"}, more...)
	}
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"connections_total", labels("web", "outcome=served"), 3},
		{"connections_total", labels("other", "outcome=cut"), 1},
		{"connection_bytes_total", labels("web", "direction=sent"), 15},
		{"connection_bytes_total", labels("web", "direction=received"), 21},
		{"connection_bytes_total", labels("other", "direction=sent"), 100},
		{"connection_bytes_total", labels("other", "direction=received"), 7},
	} {
		if got := value(t, families, "serviceplane_service_"+c.name, c.labels...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
	if got := value(t, families, "serviceplane_connections_total", "ip_family=IPv4", "outcome=served"); got != 2 {
		t.Errorf("%v connections of IPv4 were served in all, want 2", got)
	}
}
