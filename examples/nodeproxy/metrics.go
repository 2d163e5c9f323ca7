package main

import (
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/serviceplane/serviceplane/proxier"
)

// metrics are kube-proxy's, under its names, as far as syncs tell of them.
type metrics struct {
	registry *prometheus.Registry

	syncs, full, partial, programming *prometheus.HistogramVec
	lastSuccess                       *prometheus.GaugeVec
	failures, healthz, livez          *prometheus.CounterVec
}

var _ proxier.Observer = (*metrics)(nil)

func newMetrics() *metrics {
	duration := prometheus.ExponentialBuckets(0.001, 2, 15) // 1ms to 16s
	latency := slices.Concat([]float64{0.25, 0.5}, prometheus.LinearBuckets(1, 1, 59),
		prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7)) // 250ms to 5m
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "kubeproxy", Name: name, Help: help, Buckets: buckets}, []string{"ip_family"})
	}
	counter := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kubeproxy", Name: name, Help: help}, []string{label})
	}
	m := &metrics{
		registry:    prometheus.NewRegistry(),
		syncs:       histogram("sync_proxy_rules_duration_seconds", "Duration of syncs.", duration),
		full:        histogram("sync_full_proxy_rules_duration_seconds", "Duration of syncs that check everything.", duration),
		partial:     histogram("sync_partial_proxy_rules_duration_seconds", "Duration of syncs of what has changed.", duration),
		programming: histogram("network_programming_duration_seconds", "Time from a change of endpoints to its programming.", latency),
		lastSuccess: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "kubeproxy", Name: "sync_proxy_rules_last_timestamp_seconds", Help: "When the last successful sync ended.",
		}, []string{"ip_family"}),
		failures: counter("sync_proxy_rules_nftables_sync_failures_total", "Number of failed syncs.", "ip_family"),
		healthz:  counter("proxy_healthz_total", "Number of answers about health.", "code"),
		livez:    counter("proxy_livez_total", "Number of answers about liveness.", "code"),
	}
	m.registry.MustRegister(m.syncs, m.full, m.partial, m.programming, m.lastSuccess, m.failures, m.healthz, m.livez,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// ObserveSync implements proxier.Observer.
func (m *metrics) ObserveSync(r proxier.SyncReport) {
	family, ended := string(r.Family), r.Started.Add(r.Duration)
	m.syncs.WithLabelValues(family).Observe(r.Duration.Seconds())
	kind := m.partial
	if r.Full {
		kind = m.full
	}
	kind.WithLabelValues(family).Observe(r.Duration.Seconds())
	for _, trigger := range r.Triggers {
		m.programming.WithLabelValues(family).Observe(ended.Sub(trigger).Seconds())
	}
	if r.Err != nil {
		m.failures.WithLabelValues(family).Inc()
		return
	}
	m.lastSuccess.WithLabelValues(family).Set(float64(ended.UnixNano()) / float64(time.Second))
}

// answered counts the health server's answers.
func (m *metrics) answered(path string, code int) {
	answers := m.healthz
	if path == livezPath {
		answers = m.livez
	}
	answers.WithLabelValues(strconv.Itoa(code)).Inc()
}

func (m *metrics) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/proxyMode", saying("nftables"))
	mux.HandleFunc(healthzPath, saying("ok"))
	return mux
}

// saying answers with a text.
func saying(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = io.WriteString(w, text) // the client may have gone
	}
}
