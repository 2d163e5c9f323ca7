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
	scraped *scraped

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
	c := newCollectors(o.Families)
	m := &Metrics{
		scraped: newScraped(&o),

		syncs:       c.histogram(kubeProxy, "sync_proxy_rules_duration_seconds", "Duration of syncs, including failed ones.", durations, labelFamily),
		full:        c.histogram(kubeProxy, "sync_full_proxy_rules_duration_seconds", "Duration of full syncs.", durations, labelFamily),
		partial:     c.histogram(kubeProxy, "sync_partial_proxy_rules_duration_seconds", "Duration of partial syncs.", durations, labelFamily),
		programming: c.histogram(kubeProxy, "network_programming_duration_seconds", "Time from a change of endpoints until it is programmed.", latencies, labelFamily),
		conntrack:   c.histogram(kubeProxy, "conntrack_reconciler_sync_duration_seconds", "Duration of the deletion of stale flows from conntrack.", durations, labelFamily),

		lastSuccess:      c.gauge("sync_proxy_rules_last_timestamp_seconds", "Time when the last successful sync ended.", labelFamily),
		noLocalEndpoints: c.gauge("sync_proxy_rules_no_local_endpoints_total", "Service ports with traffic policy Local whose endpoints are all on other nodes.", labelPolicy, labelFamily),

		healthz:      c.counter(kubeProxy, "proxy_healthz_total", "Responses of /healthz.", labelCode),
		livez:        c.counter(kubeProxy, "proxy_livez_total", "Responses of /livez.", labelCode),
		flowsDeleted: c.counter(kubeProxy, "conntrack_reconciler_deleted_entries_total", "Stale flows deleted from conntrack.", labelFamily),

		repairs:      c.counter(serviceplane, "drift_repairs_total", "Syncs that repaired changes by other programs.", labelFamily),
		writes:       c.counter(serviceplane, "kernel_writes_total", "Kernel objects created, changed or deleted.", labelFamily),
		transactions: c.counter(serviceplane, "kernel_transactions_total", "Transactions in which kernel objects were written.", labelFamily),
		bytes:        c.counter(serviceplane, "kernel_written_bytes_total", "Bytes sent to the kernel.", labelFamily),
	}
	m.addMode(c, &o)
	return m, register(registerer, append(c.all, m.scraped))
}

// addMode adds the metrics of one mode.
func (m *Metrics) addMode(c *collectors, o *Options) {
	switch o.Mode {
	case "nftables", "ebpf": // it has the rules of nftables
		m.failures = c.counter(kubeProxy, "sync_proxy_rules_nftables_sync_failures_total", "Failed syncs.", labelFamily)
		// Here the sync itself removes stale objects.
		c.counter(kubeProxy, "sync_proxy_rules_nftables_cleanup_failures_total", "Always 0: a failed removal of stale objects counts as a failed sync.", labelFamily)
	case "iptables":
		m.failures = c.counter(kubeProxy, "sync_proxy_rules_iptables_restore_failures_total", "Failed syncs.", labelFamily)
		m.partialFailures = c.counter(kubeProxy, "sync_proxy_rules_iptables_partial_restore_failures_total", "Failed partial syncs.", labelFamily)
		m.rules = c.gauge("sync_proxy_rules_iptables_total", "Rules of the proxy in the kernel.", labelTable, labelFamily)
		m.written = c.gauge("sync_proxy_rules_iptables_last", "Rules that the last sync wrote.", labelTable, labelFamily)
	case "ipvs":
		m.failures = c.counter(kubeProxy, "sync_proxy_rules_iptables_restore_failures_total", "Failed syncs.", labelFamily)
	case "userspace":
		m.connections = newConnections(c, o.PerService)
	}
}

// ObserveHealth counts a response of the health server. Use it as
// healthcheck.HandlerOptions.Answered.
func (m *Metrics) ObserveHealth(path string, code int) {
	answers := m.healthz
	if path == "/livez" {
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
