package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// TestMetricsOfCounts: at most so many service ports have a series, the rest is in one sum. A
// series never falls while its service port exists, and no connection is in two series.
func TestMetricsOfCounts(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, MaxCounted: 2})
	if err != nil {
		t.Fatal(err)
	}
	const metric = "serviceplane_service_new_connections_total"
	if families := scrape(t, registry); families[metric] != nil {
		t.Error("there is the metric without Sources.Counts")
	}
	var now string
	var failure error
	m.Watch(metrics.Sources{Counts: func(ctx context.Context, family v1.IPFamily) (counts connection.Counts, err error) {
		if _, limited := ctx.Deadline(); !limited || family != v1.IPv4Protocol {
			t.Errorf("asked for %s, with a deadline: %v", family, limited)
		}
		for part := range strings.FieldsSeq(now) {
			p := connection.ServicePortCounts{Name: changetracker.ServicePortName{
				NamespacedName: types.NamespacedName{Namespace: "shop", Name: part[:1]}, Port: "http", Protocol: v1.ProtocolTCP,
			}}
			if _, err := fmt.Sscan(part[2:], &p.Connections); err != nil {
				t.Fatal(err)
			}
			counts.ServicePorts = append(counts.ServicePorts, p)
		}
		counts.Connections = true
		return counts, failure
	}})
	for _, step := range []struct{ counts, series string }{
		{"", ""},
		{"b=5", "b=5"},
		{"a=1 b=6", "a=1 b=6"},
		{"a=1 b=6 c=3", "a=1 b=6 others=3"},
		{"a=2 b=6 c=4 d=10", "a=2 b=6 others=14"},
		{"b=7 c=5 d=10", "b=7 others=15"},         // a is deleted; the others stay where they were
		{"b=7 c=6 d=10 e=1", "b=7 e=1 others=16"}, // a new one takes its place
		{"b=7 d=10 e=1", "b=7 e=1 others=16"},     // the sum keeps what c had
		{"b=7 c=2 d=10 e=2", "b=7 e=2 others=18"}, // another c
		{"b=7 c=1 d=10 e=2", "b=7 e=2 others=19"}, // c counts anew in another engine
	} {
		now = step.counts
		var got []string
		for _, series := range scrape(t, registry)[metric].GetMetric() {
			labels := map[string]string{}
			for _, l := range series.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			name := labels["service"]
			if want := map[string]string{"ip_family": "IPv4", "namespace": "shop", "service": name, "port": "http", "protocol": "TCP"}; name != "others" && fmt.Sprint(labels) != fmt.Sprint(want) {
				t.Errorf("labels %v, want %v", labels, want)
			}
			got = append(got, fmt.Sprintf("%s=%v", name, series.GetCounter().GetValue()))
		}
		slices.Sort(got)
		if strings.Join(got, " ") != step.series {
			t.Errorf("counts %q: series %q, want %q", step.counts, got, step.series)
		}
	}
	failure = errors.New("no kernel")
	if families := scrape(t, registry); families[metric] != nil {
		t.Error("there are numbers although they could not be read")
	}
}

// TestMetricsOfTraffic: what is not counted has no series, and the sum of others is one of each
// number.
func TestMetricsOfTraffic(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{MaxCounted: 1})
	if err != nil {
		t.Fatal(err)
	}
	port := func(name string, connections uint64, traffic connection.Traffic) connection.ServicePortCounts {
		of := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "shop", Name: name}, Protocol: v1.ProtocolUDP}
		return connection.ServicePortCounts{Name: of, Connections: connections, Traffic: traffic}
	}
	var now connection.Counts
	m.Watch(metrics.Sources{Counts: func(_ context.Context, family v1.IPFamily) (counts connection.Counts, err error) {
		if family == v1.IPv6Protocol {
			return connection.Counts{}, errors.ErrUnsupported
		}
		return now, nil
	}})
	full := connection.Traffic{PacketsIn: 1, PacketsOut: 2, BytesIn: 30, BytesOut: 40}
	for _, step := range []struct {
		name   string
		counts connection.Counts
		want   []string
	}{
		{
			"both",
			connection.Counts{Connections: true, Traffic: true, ServicePorts: []connection.ServicePortCounts{port("a", 7, full)}},
			[]string{"bytes a in 30", "bytes a out 40", "connections a 7", "losses 0", "packets a in 1", "packets a out 2"},
		},
		{
			"bytes of sockets",
			connection.Counts{Connections: true, Traffic: true, ServicePorts: []connection.ServicePortCounts{port("a", 7, connection.Traffic{BytesIn: 5})}},
			[]string{"bytes a in 5", "bytes a out 0", "connections a 7", "losses 0"},
		},
		{
			"traffic alone",
			connection.Counts{Traffic: true, TrafficLosses: 3, ServicePorts: []connection.ServicePortCounts{port("a", 0, full), port("b", 0, full), port("c", 0, full)}},
			[]string{"bytes a in 30", "bytes a out 40", "bytes others in 60", "bytes others out 80", "losses 3", "packets a in 1", "packets a out 2", "packets others in 2", "packets others out 4"},
		},
	} {
		now = step.counts
		var got []string
		for metric, kind := range map[string]string{
			"service_new_connections_total": "connections", "service_traffic_bytes_total": "bytes", "service_traffic_packets_total": "packets", "traffic_losses_total": "losses",
		} {
			for _, series := range scrape(t, registry)["serviceplane_"+metric].GetMetric() {
				labels := map[string]string{}
				for _, l := range series.GetLabel() {
					labels[l.GetName()] = l.GetValue()
				}
				words := strings.Fields(fmt.Sprint(kind, " ", labels["service"], " ", labels["direction"], " ", series.GetCounter().GetValue()))
				got = append(got, strings.Join(words, " "))
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, step.want) {
			t.Errorf("%s: series %q, want %q", step.name, got, step.want)
		}
	}
}
