package metrics

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	kubeProxy    = "kubeproxy"
	serviceplane = "serviceplane"

	labelFamily = "ip_family"
	labelPolicy = "traffic_policy"
	labelCode   = "code"
	labelTable  = "table"

	labelProtocol  = "protocol"
	labelOutcome   = "outcome"
	labelDirection = "direction"
	labelNamespace = "namespace"
	labelService   = "service"
	labelPort      = "port"
)

// durations are kube-proxy's buckets, 1ms to 16s, with more up to one hour.
var durations = append(prometheus.ExponentialBuckets(0.001, 2, 15), 30, 60, 120, 300, 600, 1200, 1800, 3600) // read-only

// latencies are kube-proxy's buckets, 250ms to 5m, with more up to one hour.
var latencies = slices.Concat([]float64{0.25, 0.5}, prometheus.LinearBuckets(1, 1, 59), // read-only
	prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7), []float64{600, 1200, 1800, 3600})

func histogram(name, help string, buckets []float64) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: kubeProxy, Name: name, Help: help, Buckets: buckets}, []string{labelFamily})
}

func gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: kubeProxy, Name: name, Help: help}, labels)
}

func counter(namespace, name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

// register registers all collectors, or none.
func register(r prometheus.Registerer, all []prometheus.Collector) error {
	for i, c := range all {
		err := r.Register(c)
		if err == nil {
			continue
		}
		for _, done := range all[:i] {
			r.Unregister(done)
		}
		if errors.As(err, new(prometheus.AlreadyRegisteredError)) {
			return fmt.Errorf("register metrics: %w: give each Provider a label with prometheus.WrapRegistererWith", err)
		}
		return fmt.Errorf("register metrics: %w", err)
	}
	return nil
}

// seconds returns a time in Unix seconds.
func seconds(t time.Time) float64 { return float64(t.UnixNano()) / float64(time.Second) }
