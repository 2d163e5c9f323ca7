package metrics

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// Options say what there is to be measured.
type Options struct {
	// Mode is the engine's, such as "nftables": some of kube-proxy's metrics exist in
	// one mode only. Any other text leaves those out.
	Mode string
	// Families are those that the proxy serves; empty means IPv4 and IPv6.
	Families []v1.IPFamily
	// PerService counts connections, and their bytes, for each service port too: in
	// mode "userspace", which alone knows of connections. The number of series has no
	// bound then: it is eight at most for every service port that has ever had a
	// connection, and they stay when the Service goes.
	PerService bool
}

// Metrics are the collectors of one Provider. It implements proxier.Observer and
// connection.Observer, and may be used by several goroutines at once.
type Metrics struct {
	status    atomic.Pointer[func() proxier.Status]
	apiServer atomic.Pointer[func() (reachable bool, failures uint64)]

	syncs, full, partial, programming, conntrack *prometheus.HistogramVec
	lastSuccess, noLocalEndpoints                *prometheus.GaugeVec
	failures                                     *prometheus.CounterVec // nil in a mode without
	healthz, livez                               *prometheus.CounterVec

	partialFailures *prometheus.CounterVec // nil but in mode iptables
	rules, written  *prometheus.GaugeVec   // nil but in mode iptables

	flowsDeleted, repairs, writes, transactions, bytes *prometheus.CounterVec

	connections *connections // nil but in mode userspace
}

var _ proxier.Observer = (*Metrics)(nil)

const (
	kubeProxy    = "kubeproxy"
	serviceplane = "serviceplane"

	labelFamily = "ip_family"
	labelPolicy = "traffic_policy"
	labelCode   = "code"
	labelTable  = "table"

	iptablesMode = "iptables"

	livezPath = "/livez"
)

// durations are kube-proxy's 1ms to 16s, doubling, and go on to an hour.
func durations() []float64 {
	return append(prometheus.ExponentialBuckets(0.001, 2, 15), 30, 60, 120, 300, 600, 1200, 1800, 3600)
}

// latencies are kube-proxy's 250ms to 5m, and go on to an hour.
func latencies() []float64 {
	return slices.Concat([]float64{0.25, 0.5}, prometheus.LinearBuckets(1, 1, 59),
		prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7), []float64{600, 1200, 1800, 3600})
}

// New registers the collectors. A registerer that has them already, from another
// Provider, is an error: give each Provider one with a label of its own, by
// prometheus.WrapRegistererWith.
func New(registerer prometheus.Registerer, o Options) (*Metrics, error) {
	if len(o.Families) == 0 {
		o.Families = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	}
	m := &Metrics{
		syncs:       histogram("sync_proxy_rules_duration_seconds", "Duration of syncs, failed ones too.", durations()),
		full:        histogram("sync_full_proxy_rules_duration_seconds", "Duration of syncs that check everything.", durations()),
		partial:     histogram("sync_partial_proxy_rules_duration_seconds", "Duration of syncs of what has changed.", durations()),
		programming: histogram("network_programming_duration_seconds", "Time from a change of endpoints to its programming.", latencies()),
		conntrack:   histogram("conntrack_reconciler_sync_duration_seconds", "Duration of clean-ups of connection tracking.", durations()),

		lastSuccess:      gauge("sync_proxy_rules_last_timestamp_seconds", "When the last successful sync ended.", labelFamily),
		noLocalEndpoints: gauge("sync_proxy_rules_no_local_endpoints_total", "Service ports with a Local traffic policy and endpoints on other nodes only.", labelPolicy, labelFamily),

		healthz:      counter(kubeProxy, "proxy_healthz_total", "Answers about health.", labelCode),
		livez:        counter(kubeProxy, "proxy_livez_total", "Answers about liveness.", labelCode),
		flowsDeleted: counter(kubeProxy, "conntrack_reconciler_deleted_entries_total", "Stale flows that connection tracking was made to forget.", labelFamily),

		repairs:      counter(serviceplane, "drift_repairs_total", "Syncs that mended what somebody else had changed.", labelFamily),
		writes:       counter(serviceplane, "kernel_writes_total", "Kernel objects created, changed or deleted.", labelFamily),
		transactions: counter(serviceplane, "kernel_transactions_total", "Atomic steps that kernel objects were written in.", labelFamily),
		bytes:        counter(serviceplane, "kernel_written_bytes_total", "Bytes sent to the kernel.", labelFamily),
	}
	all := []prometheus.Collector{
		m.syncs, m.full, m.partial, m.programming, m.conntrack, m.lastSuccess, m.noLocalEndpoints, m.healthz, m.livez,
		m.flowsDeleted, m.repairs, m.writes, m.transactions, m.bytes, newPresent(m),
	}
	ofMode := modeCounters(o.Mode)
	for _, c := range ofMode {
		all = append(all, c)
	}
	if len(ofMode) > 0 {
		m.failures = ofMode[0]
	}
	if o.Mode == iptablesMode {
		m.partialFailures = ofMode[1]
		m.rules = gauge("sync_proxy_rules_iptables_total", "Rules of the proxy.", labelTable, labelFamily)
		m.written = gauge("sync_proxy_rules_iptables_last", "Rules that the last sync wrote.", labelTable, labelFamily)
		all = append(all, m.rules, m.written)
	}
	if o.Mode == userspaceMode {
		m.connections = newConnections(&o)
		all = append(all, m.connections.collectors()...)
	}
	m.begin(o.Families, ofMode)
	return m, register(registerer, all)
}

// modeCounters are kube-proxy's counters of one mode, that of failed syncs first.
func modeCounters(mode string) []*prometheus.CounterVec {
	switch mode {
	case "nftables":
		return []*prometheus.CounterVec{
			counter(kubeProxy, "sync_proxy_rules_nftables_sync_failures_total", "Failed syncs.", labelFamily),
			// What is too much goes in the same sync here, and with it fails the sync.
			counter(kubeProxy, "sync_proxy_rules_nftables_cleanup_failures_total", "Failed removals of leftovers; they count as failed syncs, so this stays 0.", labelFamily),
		}
	case iptablesMode:
		return []*prometheus.CounterVec{
			counter(kubeProxy, "sync_proxy_rules_iptables_restore_failures_total", "Failed syncs.", labelFamily),
			counter(kubeProxy, "sync_proxy_rules_iptables_partial_restore_failures_total", "Failed syncs of what has changed.", labelFamily),
		}
	case "ipvs":
		return []*prometheus.CounterVec{counter(kubeProxy, "sync_proxy_rules_iptables_restore_failures_total", "Failed syncs.", labelFamily)}
	default:
		return nil
	}
}

// begin makes every series exist from the start, so that an alert can tell 0 from
// nothing.
func (m *Metrics) begin(families []v1.IPFamily, ofMode []*prometheus.CounterVec) {
	for _, family := range families {
		f := string(family)
		for _, h := range []*prometheus.HistogramVec{m.syncs, m.full, m.partial, m.programming, m.conntrack} {
			h.WithLabelValues(f)
		}
		for _, c := range append(ofMode, m.flowsDeleted, m.repairs, m.writes, m.transactions, m.bytes) {
			c.WithLabelValues(f)
		}
		m.lastSuccess.WithLabelValues(f)
		m.noLocalEndpoints.WithLabelValues("internal", f)
		m.noLocalEndpoints.WithLabelValues("external", f)
	}
	for _, code := range []string{"200", "503"} {
		m.healthz.WithLabelValues(code)
		m.livez.WithLabelValues(code)
	}
	if m.connections != nil {
		m.connections.begin(families)
	}
}

// register takes back what it has registered if something cannot be.
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
			return fmt.Errorf("register metrics: %w: wrap the registerer with a label that tells Providers apart", err)
		}
		return fmt.Errorf("register metrics: %w", err)
	}
	return nil
}

func histogram(name, help string, buckets []float64) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: kubeProxy, Name: name, Help: help, Buckets: buckets}, []string{labelFamily})
}

func gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: kubeProxy, Name: name, Help: help}, labels)
}

func counter(namespace, name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

// Watch says where to read what changes between syncs, a Provider's Status. Each
// scrape calls it once; before Watch, that part of the metrics is missing.
func (m *Metrics) Watch(status func() proxier.Status) { m.status.Store(&status) }

// WatchAPIServer says where to read whether the API server answers, and how often it
// did not: informer.Link.Reachable. Until it is called, those metrics are missing.
func (m *Metrics) WatchAPIServer(reachable func() (now bool, failures uint64)) {
	m.apiServer.Store(&reachable)
}

// ObserveHealth counts an answer of the health server; it fits
// healthcheck.HandlerOptions.Answered.
func (m *Metrics) ObserveHealth(path string, code int) {
	answers := m.healthz
	if path == livezPath {
		answers = m.livez
	}
	answers.WithLabelValues(strconv.Itoa(code)).Inc()
}

// ObserveSync implements proxier.Observer. A sync that waits, because somebody
// keeps changing our objects, counts as failed and has no duration.
func (m *Metrics) ObserveSync(r proxier.SyncReport) {
	family, ended := string(r.Family), r.Started.Add(r.Duration)
	m.failed(family, &r)
	if errors.Is(r.Err, proxier.ErrContested) {
		return
	}
	m.syncs.WithLabelValues(family).Observe(r.Duration.Seconds())
	kind := m.partial
	if r.Full {
		kind = m.full
	}
	kind.WithLabelValues(family).Observe(r.Duration.Seconds())
	for _, trigger := range r.Triggers {
		m.programming.WithLabelValues(family).Observe(ended.Sub(trigger).Seconds())
	}
	m.wrote(family, &r)
	if r.Err != nil {
		return
	}
	m.lastSuccess.WithLabelValues(family).Set(seconds(ended))
	m.noLocalEndpoints.WithLabelValues("internal", family).Set(float64(r.NoLocalInternal))
	m.noLocalEndpoints.WithLabelValues("external", family).Set(float64(r.NoLocalExternal))
}

// failed counts failures.
func (m *Metrics) failed(family string, r *proxier.SyncReport) {
	if r.Err == nil || m.failures == nil {
		return
	}
	m.failures.WithLabelValues(family).Inc()
	if m.partialFailures != nil && !r.Full {
		m.partialFailures.WithLabelValues(family).Inc()
	}
}

// wrote counts what a sync did to the kernel.
func (m *Metrics) wrote(family string, r *proxier.SyncReport) {
	m.writes.WithLabelValues(family).Add(float64(r.Apply.Writes))
	m.transactions.WithLabelValues(family).Add(float64(r.Apply.Transactions))
	m.bytes.WithLabelValues(family).Add(float64(r.Apply.Bytes))
	m.flowsDeleted.WithLabelValues(family).Add(float64(r.FlowsDeleted))
	for table, rules := range r.Apply.Rules {
		if m.rules != nil {
			m.rules.WithLabelValues(table, family).Set(float64(rules))
			m.written.WithLabelValues(table, family).Set(float64(r.Apply.RulesWritten[table]))
		}
	}
	if r.Repair {
		m.repairs.WithLabelValues(family).Inc()
	}
	for _, stage := range r.Stages {
		if stage.Name == proxier.StageConntrack {
			m.conntrack.WithLabelValues(family).Observe(stage.Duration.Seconds())
		}
	}
}

// seconds is a time as Prometheus has it.
func seconds(t time.Time) float64 { return float64(t.UnixNano()) / float64(time.Second) }
