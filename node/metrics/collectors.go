package metrics

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

const (
	kubeProxy    = "kubeproxy"
	serviceplane = "serviceplane"

	labelFamily = "ip_family"
	labelPolicy = "traffic_policy"
	labelCode   = "code"
	labelTable  = "table"
	labelResult = "result"
	labelState  = "state"

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

// collectors are those that New registers.
type collectors struct {
	values map[string][]string // of labels that have few
	all    []prometheus.Collector
}

func newCollectors(families []v1.IPFamily) *collectors {
	c := &collectors{values: map[string][]string{
		labelPolicy: {"internal", "external"}, labelCode: {"200", "503"},
		labelProtocol: {desired.TCP.String(), desired.UDP.String()}, labelDirection: {sent, received},
	}}
	for _, family := range families {
		c.values[labelFamily] = append(c.values[labelFamily], string(family))
	}
	for _, outcome := range connection.Outcomes() {
		c.values[labelOutcome] = append(c.values[labelOutcome], outcome.String())
	}
	return c
}

func (c *collectors) histogram(namespace, name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels)
	c.add(h.MetricVec, labels)
	return h
}

func (c *collectors) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: kubeProxy, Name: name, Help: help}, labels)
	c.add(g.MetricVec, labels)
	return g
}

func (c *collectors) counter(namespace, name, help string, labels ...string) *prometheus.CounterVec {
	n := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	c.add(n.MetricVec, labels)
	return n
}

// add adds a metric with all of its series, so that alerts see 0 before the first event. One has no series yet if
// a label has values without number.
func (c *collectors) add(metric *prometheus.MetricVec, labels []string) {
	c.all = append(c.all, metric)
	c.create(metric, labels)
}

// create creates the series whose first labels have the values of.
func (c *collectors) create(metric *prometheus.MetricVec, labels []string, of ...string) {
	if len(of) == len(labels) {
		_, _ = metric.GetMetricWithLabelValues(of...) // the number of labels fits
		return
	}
	for _, value := range c.values[labels[len(of)]] {
		c.create(metric, labels, append(slices.Clip(of), value)...)
	}
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

// seconds returns a time in Unix seconds, and 0 for none.
func seconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixNano()) / float64(time.Second)
}

func oneIf(holds bool) float64 { return map[bool]float64{true: 1}[holds] }
