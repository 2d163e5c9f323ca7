package metrics

import (
	"errors"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// Options are the options of New.
type Options struct {
	// Mode is the engine: "nftables", "iptables", "ipvs", "ebpf" or "userspace". Some
	// metrics exist in one mode only; any other text omits them.
	Mode string
	// Families are the IP families of the proxy; empty means IPv4 and IPv6.
	Families []v1.IPFamily
	// PerService also counts connections and their bytes for each service port, in mode
	// "userspace". The number of series is then unbounded: up to eight for every service
	// port that has ever had a connection. They stay after the Service is deleted.
	PerService bool
	// MaxCounted is how many service ports have series of their own in each IP family for
	// Sources.Counts: the first ones that get connections. All others share one. 0 means 1,000.
	MaxCounted int
}

// Metrics holds the collectors of one Provider. It implements proxier.Observer and
// connection.Observer. Several goroutines may use it at once.
type Metrics struct {
	sources sources

	syncs, full, partial, programming, conntrack *prometheus.HistogramVec
	lastSuccess, noLocalEndpoints                *prometheus.GaugeVec
	failures                                     *prometheus.CounterVec // nil in mode userspace
	healthz, livez                               *prometheus.CounterVec

	partialFailures *prometheus.CounterVec // only in mode iptables
	rules, written  *prometheus.GaugeVec   // only in mode iptables

	flowsDeleted, repairs, writes, transactions, bytes *prometheus.CounterVec

	connections *connections // only in mode userspace
}

var _ proxier.Observer = (*Metrics)(nil)

const (
	iptablesMode  = "iptables"
	userspaceMode = "userspace"
	ebpfMode      = "ebpf" // whose rules are those of nftables

	livezPath = "/livez"
)

// New registers the collectors. It fails if the registerer has them already, from
// another Provider: give each Provider a label of its own with
// prometheus.WrapRegistererWith.
func New(registerer prometheus.Registerer, o Options) (*Metrics, error) {
	if len(o.Families) == 0 {
		o.Families = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	}
	if o.MaxCounted <= 0 {
		o.MaxCounted = defaultCounted
	}
	m := &Metrics{
		syncs:       histogram("sync_proxy_rules_duration_seconds", "Duration of syncs, including failed ones.", durations),
		full:        histogram("sync_full_proxy_rules_duration_seconds", "Duration of full syncs.", durations),
		partial:     histogram("sync_partial_proxy_rules_duration_seconds", "Duration of partial syncs.", durations),
		programming: histogram("network_programming_duration_seconds", "Time from a change of endpoints until it is programmed.", latencies),
		conntrack:   histogram("conntrack_reconciler_sync_duration_seconds", "Duration of the deletion of stale flows from conntrack.", durations),

		lastSuccess:      gauge("sync_proxy_rules_last_timestamp_seconds", "Time when the last successful sync ended.", labelFamily),
		noLocalEndpoints: gauge("sync_proxy_rules_no_local_endpoints_total", "Service ports with traffic policy Local whose endpoints are all on other nodes.", labelPolicy, labelFamily),

		healthz:      counter(kubeProxy, "proxy_healthz_total", "Responses of /healthz.", labelCode),
		livez:        counter(kubeProxy, "proxy_livez_total", "Responses of /livez.", labelCode),
		flowsDeleted: counter(kubeProxy, "conntrack_reconciler_deleted_entries_total", "Stale flows deleted from conntrack.", labelFamily),

		repairs:      counter(serviceplane, "drift_repairs_total", "Syncs that repaired changes by other programs.", labelFamily),
		writes:       counter(serviceplane, "kernel_writes_total", "Kernel objects created, changed or deleted.", labelFamily),
		transactions: counter(serviceplane, "kernel_transactions_total", "Transactions in which kernel objects were written.", labelFamily),
		bytes:        counter(serviceplane, "kernel_written_bytes_total", "Bytes sent to the kernel.", labelFamily),
	}
	all := []prometheus.Collector{
		m.syncs, m.full, m.partial, m.programming, m.conntrack, m.lastSuccess, m.noLocalEndpoints, m.healthz, m.livez,
		m.flowsDeleted, m.repairs, m.writes, m.transactions, m.bytes,
		newStatusCollector(&m.sources), newCanaryCollector(&m.sources), newHealthCollector(&m.sources), newCountCollector(&m.sources, &o), newSocketCollector(&m.sources, o.Families),
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
		m.rules = gauge("sync_proxy_rules_iptables_total", "Rules of the proxy in the kernel.", labelTable, labelFamily)
		m.written = gauge("sync_proxy_rules_iptables_last", "Rules that the last sync wrote.", labelTable, labelFamily)
		all = append(all, m.rules, m.written)
	}
	if o.Mode == userspaceMode {
		m.connections = newConnections(&o)
		all = append(all, m.connections.collectors()...)
	}
	m.initSeries(o.Families, ofMode)
	return m, register(registerer, all)
}

// modeCounters returns kube-proxy's counters of one mode. The first one counts failed
// syncs.
func modeCounters(mode string) []*prometheus.CounterVec {
	switch mode {
	case "nftables", ebpfMode:
		return []*prometheus.CounterVec{
			counter(kubeProxy, "sync_proxy_rules_nftables_sync_failures_total", "Failed syncs.", labelFamily),
			// Here the sync itself removes stale objects.
			counter(kubeProxy, "sync_proxy_rules_nftables_cleanup_failures_total", "Always 0: a failed removal of stale objects counts as a failed sync.", labelFamily),
		}
	case iptablesMode:
		return []*prometheus.CounterVec{
			counter(kubeProxy, "sync_proxy_rules_iptables_restore_failures_total", "Failed syncs.", labelFamily),
			counter(kubeProxy, "sync_proxy_rules_iptables_partial_restore_failures_total", "Failed partial syncs.", labelFamily),
		}
	case "ipvs":
		return []*prometheus.CounterVec{counter(kubeProxy, "sync_proxy_rules_iptables_restore_failures_total", "Failed syncs.", labelFamily)}
	default:
		return nil
	}
}

// initSeries creates every series, so that alerts see 0 before the first event.
func (m *Metrics) initSeries(families []v1.IPFamily, ofMode []*prometheus.CounterVec) {
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
		m.connections.initSeries(families)
	}
}

// ObserveHealth counts a response of the health server. Use it as
// healthcheck.HandlerOptions.Answered.
func (m *Metrics) ObserveHealth(path string, code int) {
	answers := m.healthz
	if path == livezPath {
		answers = m.livez
	}
	answers.WithLabelValues(strconv.Itoa(code)).Inc()
}

// ObserveSync implements proxier.Observer. A sync that is postponed because another
// program keeps changing the proxy's objects counts as failed and has no duration.
func (m *Metrics) ObserveSync(r proxier.SyncReport) {
	family, ended := string(r.Family), r.Started.Add(r.Duration)
	m.countFailure(family, &r)
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
	m.countWrites(family, &r)
	if r.Err != nil {
		return
	}
	m.lastSuccess.WithLabelValues(family).Set(seconds(ended))
	m.noLocalEndpoints.WithLabelValues("internal", family).Set(float64(r.NoLocalInternal))
	m.noLocalEndpoints.WithLabelValues("external", family).Set(float64(r.NoLocalExternal))
}

func (m *Metrics) countFailure(family string, r *proxier.SyncReport) {
	if r.Err == nil || m.failures == nil {
		return
	}
	m.failures.WithLabelValues(family).Inc()
	if m.partialFailures != nil && !r.Full {
		m.partialFailures.WithLabelValues(family).Inc()
	}
}

// countWrites counts what a sync wrote to the kernel.
func (m *Metrics) countWrites(family string, r *proxier.SyncReport) {
	for counter, n := range map[*prometheus.CounterVec]int{
		m.writes: r.Apply.Writes, m.transactions: r.Apply.Transactions, m.bytes: r.Apply.Bytes, m.flowsDeleted: r.FlowsDeleted,
	} {
		counter.WithLabelValues(family).Add(float64(max(0, n))) // it panics if an engine reports less than nothing
	}
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
