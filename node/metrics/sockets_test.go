package metrics_test

import (
	"errors"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// TestSockets: the numbers are those of the function; a family without any has no series.
func TestSockets(t *testing.T) {
	const (
		translated, left = "serviceplane_sockets_translated_total", "serviceplane_sockets_left_to_rules_total"
		ended            = "serviceplane_sockets_ended_total"
		forwarded        = "serviceplane_forward_packets_total"
	)
	m, registry := measure(t, metrics.Options{Mode: "ebpf"})
	if families := scrape(t, registry); families[translated] != nil || families[left] != nil || families[forwarded] != nil {
		t.Error("sockets have metrics without a source")
	}
	m.Watch(metrics.Sources{Sockets: func(family v1.IPFamily) (connection.SocketCounts, error) {
		if family == v1.IPv6Protocol {
			return connection.SocketCounts{}, errors.New("nothing is attached")
		}
		return connection.SocketCounts{Translated: 7, Ended: 3, Bound: 2}, nil
	}, Forwarded: func(family v1.IPFamily) (packets, toPeer uint64, err error) {
		if family == v1.IPv6Protocol {
			return 0, 0, errors.New("nothing is attached")
		}
		return 9, 4, nil
	}})
	families := scrape(t, registry)
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{translated, []string{"ip_family=IPv4"}, 7},
		{ended, []string{"ip_family=IPv4"}, 3},
		{left, []string{"ip_family=IPv4", "reason=bound"}, 2},
		{left, []string{"ip_family=IPv4", "reason=empty"}, 0},
		{forwarded, []string{"ip_family=IPv4", "to=device"}, 5},
		{forwarded, []string{"ip_family=IPv4", "to=peer"}, 4},
		{"kubeproxy_sync_proxy_rules_nftables_sync_failures_total", []string{"ip_family=IPv4"}, 0}, // of the rules
	} {
		if got := value(t, families, c.name, c.labels...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
	if n := len(families[translated].GetMetric()); n != 1 {
		t.Errorf("%d families have numbers, want IPv4 alone", n)
	}
}
