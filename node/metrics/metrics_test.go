package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/node/canary"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// scrape scrapes a registry as Prometheus does.
func scrape(t *testing.T, registry *prometheus.Registry) map[string]*dto.MetricFamily {
	t.Helper()
	w := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	text := w.Body.String()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatalf("parse: %v\n%s", err, text)
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil {
		t.Errorf("lint: %v", err)
	}
	for _, p := range problems {
		// Names of kube-proxy's gauges, which must stay.
		if p.Metric != "kubeproxy_sync_proxy_rules_no_local_endpoints_total" && p.Metric != "kubeproxy_sync_proxy_rules_iptables_total" {
			t.Errorf("lint: %s: %s", p.Metric, p.Text)
		}
	}
	return families
}

// value returns the value of the one series with all these labels, "name=value".
func value(t *testing.T, families map[string]*dto.MetricFamily, name string, labels ...string) float64 {
	t.Helper()
	for _, m := range families[name].GetMetric() {
		if !hasAll(m, labels) {
			continue
		}
		if h := m.GetHistogram(); h != nil {
			return float64(h.GetSampleCount())
		}
		return m.GetCounter().GetValue() + m.GetGauge().GetValue() // one of them is 0
	}
	t.Errorf("no %s with %v", name, labels)
	return math.NaN()
}

func hasAll(m *dto.Metric, labels []string) bool {
	for _, want := range labels {
		if !slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName()+"="+l.GetValue() == want }) {
			return false
		}
	}
	return true
}

// proxy is a running Provider with metrics.
type proxy struct {
	*proxier.Proxier

	engines  map[v1.IPFamily]*proxiertest.RecordingEngine
	registry *prometheus.Registry
}

func start(t *testing.T) *proxy {
	t.Helper()
	p := &proxy{registry: prometheus.NewRegistry(), engines: map[v1.IPFamily]*proxiertest.RecordingEngine{}}
	m, err := metrics.New(p.registry, metrics.Options{Mode: "nftables"})
	if err != nil {
		t.Fatal(err)
	}
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		p.engines[family] = &proxiertest.RecordingEngine{}
		engines[family] = p.engines[family]
	}
	p.Proxier, err = proxier.New(proxier.Config{Runner: runner.Options{MinInterval: runner.Unlimited}}, proxier.Deps{Observer: m}, engines)
	if err != nil {
		t.Fatal(err)
	}
	m.Watch(metrics.Sources{Status: p.Status})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	p.sync(t)
	return p
}

func (p *proxy) sync(t *testing.T) {
	t.Helper()
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Fatalf("sync: %v", err)
	}
}

// add adds a Service with an endpoint on another node.
func (p *proxy) add(name string, number int, options ...proxiertest.ServiceOption) {
	options = append([]proxiertest.ServiceOption{
		proxiertest.ClusterIPs(fmt.Sprintf("10.96.%d.%d", number>>8, number&255)), proxiertest.NodePort("", v1.ProtocolTCP, 80, int32(30000+number)),
	}, options...)
	p.OnServiceAdd(proxiertest.Service("test", name, options...))
	p.OnEndpointSliceAdd(proxiertest.Slice("test", name, discovery.AddressTypeIPv4,
		proxiertest.SlicePort("", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.0.1", proxiertest.OnNode("there"))))
}

// All metrics of kube-proxy in this mode exist from the first scrape on, with type and
// labels: MET-01 to MET-11, MET-13, MET-14 and MET-18 to MET-21.
func TestEveryNameOfKubeProxy(t *testing.T) {
	families := scrape(t, start(t).registry)
	family := "ip_family"
	for name, want := range map[string]struct {
		kind   dto.MetricType
		labels []string
	}{
		"sync_proxy_rules_duration_seconds":                {dto.MetricType_HISTOGRAM, []string{family}},
		"sync_full_proxy_rules_duration_seconds":           {dto.MetricType_HISTOGRAM, []string{family}},
		"sync_partial_proxy_rules_duration_seconds":        {dto.MetricType_HISTOGRAM, []string{family}},
		"sync_proxy_rules_last_timestamp_seconds":          {dto.MetricType_GAUGE, []string{family}},
		"network_programming_duration_seconds":             {dto.MetricType_HISTOGRAM, []string{family}},
		"sync_proxy_rules_endpoint_changes_pending":        {dto.MetricType_GAUGE, nil},
		"sync_proxy_rules_endpoint_changes_total":          {dto.MetricType_COUNTER, nil},
		"sync_proxy_rules_service_changes_total":           {dto.MetricType_COUNTER, nil},
		"sync_proxy_rules_service_changes_pending":         {dto.MetricType_GAUGE, nil},
		"sync_proxy_rules_last_queued_timestamp_seconds":   {dto.MetricType_GAUGE, []string{family}},
		"sync_proxy_rules_no_local_endpoints_total":        {dto.MetricType_GAUGE, []string{family, "traffic_policy"}},
		"proxy_healthz_total":                              {dto.MetricType_COUNTER, []string{"code"}},
		"proxy_livez_total":                                {dto.MetricType_COUNTER, []string{"code"}},
		"conntrack_reconciler_sync_duration_seconds":       {dto.MetricType_HISTOGRAM, []string{family}},
		"conntrack_reconciler_deleted_entries_total":       {dto.MetricType_COUNTER, []string{family}},
		"sync_proxy_rules_nftables_sync_failures_total":    {dto.MetricType_COUNTER, []string{family}},
		"sync_proxy_rules_nftables_cleanup_failures_total": {dto.MetricType_COUNTER, []string{family}},
	} {
		got := families["kubeproxy_"+name]
		if got == nil || got.GetType() != want.kind {
			t.Errorf("%s: type %v, want %v", name, got.GetType(), want.kind)
			continue
		}
		for _, m := range got.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName())
			}
			if !slices.Equal(slices.Sorted(slices.Values(labels)), want.labels) {
				t.Errorf("%s: labels %v, want %v", name, labels, want.labels)
			}
		}
		if slices.Contains(want.labels, family) {
			for _, ip := range []string{"ip_family=IPv4", "ip_family=IPv6"} {
				value(t, families, "kubeproxy_"+name, ip)
			}
		}
	}
}

// Histograms have kube-proxy's buckets, and more up to one hour.
func TestHistogramsReachOneHour(t *testing.T) {
	families := scrape(t, start(t).registry)
	for name, theirs := range map[string][]float64{
		"kubeproxy_sync_proxy_rules_duration_seconds":          {0.001, 0.002, 0.512, 1.024, 16.384},
		"kubeproxy_sync_full_proxy_rules_duration_seconds":     {0.001, 16.384},
		"kubeproxy_sync_partial_proxy_rules_duration_seconds":  {0.001, 16.384},
		"kubeproxy_conntrack_reconciler_sync_duration_seconds": {0.001, 16.384},
		"kubeproxy_network_programming_duration_seconds":       {0.25, 0.5, 1, 2, 59, 60, 65, 115, 120, 150, 300},
	} {
		var bounds []float64
		for _, b := range families[name].GetMetric()[0].GetHistogram().GetBucket() {
			if !math.IsInf(b.GetUpperBound(), 0) {
				bounds = append(bounds, b.GetUpperBound())
			}
		}
		if got := bounds[len(bounds)-1]; got != 3600 {
			t.Errorf("%s reaches %v, want 3600", name, got)
		}
		for _, b := range theirs {
			if !slices.Contains(bounds, b) {
				t.Errorf("%s has buckets %v, want %v too", name, bounds, b)
			}
		}
	}
}

// MET-01 to MET-05, MET-11, MET-18 to MET-20.
func TestSyncsAreMeasured(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{Mode: "nftables"})
	if err != nil {
		t.Fatal(err)
	}
	started := time.Unix(1000, 0)
	m.ObserveSync(proxier.SyncReport{
		Family: v1.IPv4Protocol, Full: true, Repair: true, Started: started, Duration: 500 * time.Millisecond,
		Triggers: []time.Time{started.Add(-time.Second), started.Add(-time.Minute)},
		Stages:   []proxier.Stage{{Name: proxier.StageApply, Duration: time.Second}, {Name: proxier.StageConntrack, Duration: time.Second}},
		Apply:    proxier.ApplyReport{Writes: 7, Transactions: 2, Bytes: 300}, FlowsDeleted: 3,
		NoLocalInternal: 4, NoLocalExternal: 5,
	})
	m.ObserveSync(proxier.SyncReport{Family: v1.IPv4Protocol, Started: started.Add(time.Hour), Duration: time.Second, Err: errors.New("no")})
	m.ObserveSync(proxier.SyncReport{Family: v1.IPv6Protocol, Err: proxier.ErrContested})
	m.ObserveHealth("/healthz", 200)
	m.ObserveHealth("/livez", 503)
	families := scrape(t, registry)
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"kubeproxy_sync_proxy_rules_duration_seconds", []string{"ip_family=IPv4"}, 2},
		{"kubeproxy_sync_proxy_rules_duration_seconds", []string{"ip_family=IPv6"}, 0},
		{"kubeproxy_sync_full_proxy_rules_duration_seconds", []string{"ip_family=IPv4"}, 1},
		{"kubeproxy_sync_partial_proxy_rules_duration_seconds", []string{"ip_family=IPv4"}, 1},
		{"kubeproxy_network_programming_duration_seconds", []string{"ip_family=IPv4"}, 2},
		{"kubeproxy_sync_proxy_rules_last_timestamp_seconds", []string{"ip_family=IPv4"}, 1000.5},
		{"kubeproxy_sync_proxy_rules_nftables_sync_failures_total", []string{"ip_family=IPv4"}, 1},
		{"kubeproxy_sync_proxy_rules_nftables_sync_failures_total", []string{"ip_family=IPv6"}, 1},
		{"kubeproxy_sync_proxy_rules_no_local_endpoints_total", []string{"ip_family=IPv4", "traffic_policy=internal"}, 4},
		{"kubeproxy_sync_proxy_rules_no_local_endpoints_total", []string{"ip_family=IPv4", "traffic_policy=external"}, 5},
		{"kubeproxy_conntrack_reconciler_sync_duration_seconds", []string{"ip_family=IPv4"}, 1},
		{"kubeproxy_conntrack_reconciler_deleted_entries_total", []string{"ip_family=IPv4"}, 3},
		{"kubeproxy_proxy_healthz_total", []string{"code=200"}, 1},
		{"kubeproxy_proxy_healthz_total", []string{"code=503"}, 0},
		{"kubeproxy_proxy_livez_total", []string{"code=503"}, 1},
		{"serviceplane_drift_repairs_total", []string{"ip_family=IPv4"}, 1},
		{"serviceplane_kernel_writes_total", []string{"ip_family=IPv4"}, 7},
		{"serviceplane_kernel_transactions_total", []string{"ip_family=IPv4"}, 2},
		{"serviceplane_kernel_written_bytes_total", []string{"ip_family=IPv4"}, 300},
	} {
		if got := value(t, families, c.name, c.labels...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
	if families["serviceplane_pending_seconds"] != nil {
		t.Error("there is a metric of the Status without Watch")
	}
}

// MET-06 to MET-10, and metrics that kube-proxy does not have.
func TestWhatIsReadAtAScrape(t *testing.T) {
	p := start(t)
	began := time.Now()
	for _, engine := range p.engines {
		engine.Fail(errors.New("the kernel is full"))
	}
	p.add("web", 1, proxiertest.ExternalPolicyLocal(), proxiertest.InternalPolicyLocal(), proxiertest.ExternalIPs("nonsense", "1.2.3"))
	p.add("other", 2)
	if err := p.Sync(t.Context()); err == nil {
		t.Fatal("sync = nil, want the engine's error")
	}
	families := scrape(t, p.registry)
	for name, want := range map[string]float64{
		"kubeproxy_sync_proxy_rules_endpoint_changes_pending": 2,
		"kubeproxy_sync_proxy_rules_endpoint_changes_total":   2,
		"kubeproxy_sync_proxy_rules_service_changes_pending":  2,
		"kubeproxy_sync_proxy_rules_service_changes_total":    2,
	} {
		if got := value(t, families, name); got != want {
			t.Errorf("%s = %v, want %v", name, got, want)
		}
	}
	if got := value(t, families, "serviceplane_pending_seconds", "ip_family=IPv4"); got <= 0 || got > time.Since(began).Seconds() {
		t.Errorf("pending for %vs, want the time since %v", got, began)
	}
	for _, missing := range []string{"Conntrack", "Health"} {
		if got := value(t, families, "serviceplane_dependency_missing", "dependency="+missing); got != 1 {
			t.Errorf("%s is missing: %v, want 1", missing, got)
		}
	}
	if got := value(t, families, "serviceplane_values_set_aside", "reason=invalid address"); got != 2 {
		t.Errorf("%v values set aside as invalid addresses, want 2", got)
	}
	if got := value(t, families, "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "ip_family=IPv6"); got < float64(began.Unix()) {
		t.Errorf("last queued at %v, want after %v", got, began.Unix())
	}
	for _, engine := range p.engines {
		engine.Fail(nil)
	}
	p.sync(t)
	families = scrape(t, p.registry)
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"kubeproxy_sync_proxy_rules_endpoint_changes_pending", nil, 0},
		{"kubeproxy_sync_proxy_rules_service_changes_pending", nil, 0},
		{"serviceplane_pending_seconds", []string{"ip_family=IPv4"}, 0},
		{"serviceplane_service_ports", []string{"ip_family=IPv4"}, 2},
		{"serviceplane_service_ports", []string{"ip_family=IPv6"}, 0},
		{"serviceplane_service_ports_failed", []string{"ip_family=IPv4"}, 0},
		{"kubeproxy_sync_proxy_rules_no_local_endpoints_total", []string{"ip_family=IPv4", "traffic_policy=internal"}, 1},
		{"kubeproxy_sync_proxy_rules_no_local_endpoints_total", []string{"ip_family=IPv4", "traffic_policy=external"}, 1},
	} {
		if got := value(t, families, c.name, c.labels...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
}

// 2,000 Services with all kinds of problems add no series.
func TestTheNumberOfSeriesDoesNotDependOnServices(t *testing.T) {
	p := start(t)
	count := func() map[string]int {
		n := map[string]int{}
		for name, f := range scrape(t, p.registry) {
			n[name] = len(f.GetMetric())
		}
		return n
	}
	before := count()
	for i := range 2000 {
		p.add(fmt.Sprintf("web-%d", i), i, proxiertest.ExternalPolicyLocal(), proxiertest.ExternalIPs("nonsense"), proxiertest.SourceRanges("10.0.0.0/99"))
	}
	p.sync(t)
	after := count()
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("series (-before +after):\n%s", diff)
	}
	total := 0
	for n := range maps.Values(after) {
		total += n
	}
	if total > 100 {
		t.Errorf("%d series, want 100 at most", total)
	}
}

// Providers can share a registry if a label distinguishes them. Without the label, the
// second one fails and the first one stays.
func TestProvidersShareARegistry(t *testing.T) {
	registry := prometheus.NewRegistry()
	for _, instance := range []string{"a", "b"} {
		if _, err := metrics.New(prometheus.WrapRegistererWith(prometheus.Labels{"instance": instance}, registry), metrics.Options{}); err != nil {
			t.Errorf("New for %s = %v, want nil", instance, err)
		}
	}
	_, err := metrics.New(prometheus.WrapRegistererWith(prometheus.Labels{"instance": "a"}, registry), metrics.Options{Mode: "nftables"})
	if err == nil || !strings.Contains(err.Error(), "label") {
		t.Errorf("New for the second a = %v, want an error that says what to do", err)
	}
	families := scrape(t, registry)
	if families["kubeproxy_sync_proxy_rules_nftables_sync_failures_total"] != nil {
		t.Error("the one that failed has left collectors behind")
	}
	if got := len(families["kubeproxy_proxy_healthz_total"].GetMetric()); got != 4 {
		t.Errorf("%d series of healthz, want 4: two of each", got)
	}
}

// MET-12, MET-15 to MET-17.
func TestTheMetricsOfIPTables(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{Mode: "iptables"})
	if err != nil {
		t.Fatal(err)
	}
	m.ObserveSync(proxier.SyncReport{Family: v1.IPv4Protocol, Full: true, Apply: proxier.ApplyReport{
		Rules: map[string]int{"nat": 30, "filter": 7}, RulesWritten: map[string]int{"nat": 4},
	}})
	m.ObserveSync(proxier.SyncReport{Family: v1.IPv4Protocol, Full: true, Err: errors.New("no")})
	m.ObserveSync(proxier.SyncReport{Family: v1.IPv4Protocol, Err: errors.New("no")})
	families := scrape(t, registry)
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"sync_proxy_rules_iptables_restore_failures_total", []string{"ip_family=IPv4"}, 2},
		{"sync_proxy_rules_iptables_restore_failures_total", []string{"ip_family=IPv6"}, 0},
		{"sync_proxy_rules_iptables_partial_restore_failures_total", []string{"ip_family=IPv4"}, 1},
		{"sync_proxy_rules_iptables_total", []string{"ip_family=IPv4", "table=nat"}, 30},
		{"sync_proxy_rules_iptables_total", []string{"ip_family=IPv4", "table=filter"}, 7},
		{"sync_proxy_rules_iptables_last", []string{"ip_family=IPv4", "table=nat"}, 4},
		{"sync_proxy_rules_iptables_last", []string{"ip_family=IPv4", "table=filter"}, 0},
	} {
		if got := value(t, families, "kubeproxy_"+c.name, c.labels...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
	if families["kubeproxy_sync_proxy_rules_nftables_sync_failures_total"] != nil {
		t.Error("there are metrics of mode nftables")
	}
}

// TestPacketsOfTheKernel: MET-22 and MET-23. What the kernel does not count is missing.
func TestPacketsOfTheKernel(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{Mode: "iptables"})
	if err != nil {
		t.Fatal(err)
	}
	const localhost, invalid = "kubeproxy_iptables_localhost_nodeports_accepted_packets_total", "kubeproxy_iptables_ct_state_invalid_dropped_packets_total"
	families := scrape(t, registry)
	if families[localhost] != nil || families[invalid] != nil {
		t.Error("there are metrics of packets without a source")
	}
	m.Watch(metrics.Sources{
		LocalhostNodePorts: func() (uint64, bool) { return 7, true },
		Invalid:            func() (uint64, bool) { return 9, false },
	})
	families = scrape(t, registry)
	if got := value(t, families, localhost); got != 7 || families[invalid] != nil {
		t.Errorf("%v packets to node ports, and %v invalid ones, want 7 and none", got, families[invalid])
	}
}

// A report with less than nothing counts as nothing: a counter would panic, and end the proxy.
func TestAReportOfLessThanNothing(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m.ObserveSync(proxier.SyncReport{
		Family: v1.IPv4Protocol, Apply: proxier.ApplyReport{Writes: -1, Transactions: -1, Bytes: -1}, FlowsDeleted: -1,
	})
	if n := value(t, scrape(t, registry), "serviceplane_kernel_writes_total", "ip_family=IPv4"); n != 0 {
		t.Errorf("%v writes, want 0", n)
	}
}

// The metrics of the API server exist with Sources.APIServer.
func TestTheAPIServersMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const reachable, failures = "serviceplane_apiserver_reachable", "serviceplane_apiserver_failures_total"
	if families := scrape(t, registry); families[reachable] != nil || families[failures] != nil {
		t.Error("there is a metric of the API server without Sources.APIServer")
	}
	for _, now := range []bool{true, false} {
		m.Watch(metrics.Sources{APIServer: func() (bool, uint64) { return now, 7 }})
		families := scrape(t, registry)
		if up, n := value(t, families, reachable), value(t, families, failures); (up == 1) != now || n != 7 {
			t.Errorf("reachable %v after %v failures, want %t after 7", up, n, now)
		}
	}
}

// The metrics of a canary exist with Sources.Canary. What is not tested neither passes nor fails: an alert on 0
// would go off for an IP family that the node does not have.
func TestTheCanarysMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const passing = "serviceplane_canary_passing"
	if families := scrape(t, registry); families[passing] != nil {
		t.Error("there is a metric of the canary without Sources.Canary")
	}
	const absent = -1
	for state, want := range map[canary.TestState]float64{canary.StateWaiting: absent, canary.StatePassing: 1, canary.StateFailing: 0, canary.StateUntested: absent} {
		m.Watch(metrics.Sources{Canary: func() map[v1.IPFamily]canary.TestStatus {
			return map[v1.IPFamily]canary.TestStatus{v1.IPv6Protocol: {
				State: state, Passed: 5, Failed: 2, LastSuccess: time.Unix(1700000000, 0), Took: 2 * time.Millisecond,
			}}
		}})
		families := scrape(t, registry)
		if want == absent {
			if families[passing] != nil {
				t.Errorf("state %v: there is a sample of %s, want none", state, passing)
			}
		} else if got := value(t, families, passing, "ip_family=IPv6"); got != want {
			t.Errorf("state %v: %s is %v, want %v", state, passing, got, want)
		}
		for metric, want := range map[string]float64{
			"serviceplane_canary_last_success_timestamp_seconds": 1700000000,
			"serviceplane_canary_duration_seconds":               0.002,
		} {
			if got := value(t, families, metric, "ip_family=IPv6"); got != want {
				t.Errorf("state %v: %s is %v, want %v", state, metric, got, want)
			}
		}
		const tests = "serviceplane_canary_tests_total"
		if passed, failed := value(t, families, tests, "result=passed"), value(t, families, tests, "result=failed"); passed != 5 || failed != 2 {
			t.Errorf("tests passed %v, failed %v, want 5 and 2", passed, failed)
		}
	}
}
