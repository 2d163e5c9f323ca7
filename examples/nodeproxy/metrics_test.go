package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// get asks the metrics server.
func get(t *testing.T, m *metrics, path string) (text string, header http.Header) {
	t.Helper()
	w := httptest.NewRecorder()
	m.handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	if w.Code != http.StatusOK {
		t.Errorf("%s: code %d, want 200", path, w.Code)
	}
	return w.Body.String(), w.Header()
}

func scrape(t *testing.T, m *metrics) string {
	t.Helper()
	text, _ := get(t, m, "/metrics")
	return text
}

// TestSyncsAreMeasured under kube-proxy's names: MET-01 to MET-05, MET-20.
func TestSyncsAreMeasured(t *testing.T) {
	m := newMetrics()
	started := time.Unix(1000, 0)
	m.ObserveSync(proxier.SyncReport{
		Family: v1.IPv4Protocol, Full: true, Started: started, Duration: 500 * time.Millisecond,
		Triggers: []time.Time{started.Add(-time.Second), started.Add(-time.Minute)},
	})
	m.ObserveSync(proxier.SyncReport{Family: v1.IPv4Protocol, Started: started.Add(time.Hour), Duration: time.Second, Err: errors.New("no")})
	m.ObserveSync(proxier.SyncReport{Family: v1.IPv6Protocol, Started: started.Add(time.Hour), Duration: time.Millisecond})
	text := scrape(t, m)
	for _, want := range []string{
		`kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family="IPv4"} 1.5`,
		`kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family="IPv4",le="0.512"} 1`,
		`kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family="IPv6",le="16.384"} 1`,
		`kubeproxy_sync_full_proxy_rules_duration_seconds_sum{ip_family="IPv4"} 0.5`,
		`kubeproxy_sync_partial_proxy_rules_duration_seconds_sum{ip_family="IPv4"} 1`,
		`kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 1000.5`,
		`kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv4",le="1"} 0`,
		`kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv4",le="2"} 1`,
		`kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv4",le="65"} 2`,
		`kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv4",le="300"} 2`,
		`kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"} 1`,
		"go_goroutines ",
	} {
		if !strings.Contains(text, want+"\n") && !strings.Contains(text, "\n"+want) {
			t.Errorf("metrics lack %q", want)
		}
	}
	for _, unwanted := range []string{`full_proxy_rules_duration_seconds_sum{ip_family="IPv6"}`, `failures_total{ip_family="IPv6"}`} {
		if strings.Contains(text, unwanted) {
			t.Errorf("metrics have %q", unwanted)
		}
	}
}

// TestTheMetricsServersOtherPages: HC-40.
func TestTheMetricsServersOtherPages(t *testing.T) {
	for path, want := range map[string]string{"/proxyMode": "nftables", "/healthz": "ok"} {
		text, header := get(t, newMetrics(), path)
		if text != want || header.Get("Content-Type") != "text/plain; charset=utf-8" || header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s = %q with %v, want %q as plain text, nosniff", path, text, header, want)
		}
	}
}
