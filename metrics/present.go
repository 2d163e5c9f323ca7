package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// present collects what is read from the Status, at the time of a scrape.
type present struct {
	metrics *Metrics

	endpointsPending, endpointsTotal, servicesPending, servicesTotal, lastQueued *prometheus.Desc

	setAside, pending, ports, failed, damages, condition, without *prometheus.Desc

	descriptors, descriptorLimit, descriptorLosses *prometheus.Desc
	reachable, unreached                           *prometheus.Desc
}

func newPresent(m *Metrics) *present {
	desc := func(namespace, name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
	}
	return &present{
		metrics:          m,
		endpointsPending: desc(kubeProxy, "sync_proxy_rules_endpoint_changes_pending", "Changes of EndpointSlices that are not programmed."),
		endpointsTotal:   desc(kubeProxy, "sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices that have arrived."),
		servicesPending:  desc(kubeProxy, "sync_proxy_rules_service_changes_pending", "Services whose changes are not programmed."),
		servicesTotal:    desc(kubeProxy, "sync_proxy_rules_service_changes_total", "Changes of Services that have arrived."),
		lastQueued:       desc(kubeProxy, "sync_proxy_rules_last_queued_timestamp_seconds", "When a sync was asked for last.", labelFamily),
		setAside:         desc(serviceplane, "values_set_aside", "Values of API objects that are set aside at the moment.", "reason"),
		pending:          desc(serviceplane, "pending_seconds", "How long the oldest change has been waiting to be programmed; 0 if there is none.", labelFamily),
		ports:            desc(serviceplane, "service_ports", "Service ports that are programmed.", labelFamily),
		failed:           desc(serviceplane, "service_ports_failed", "Service ports that could not be programmed as they should be.", labelFamily),
		damages:          desc(serviceplane, "damages_total", "Changes of the proxy's kernel objects by somebody else that were noticed.", labelFamily),
		condition:        desc(serviceplane, "condition", "1 while there is something that an operator should look at.", "type", labelFamily),
		without:          desc(serviceplane, "dependency_missing", "1 for what the program should give the proxy and does not, as packets may miss it.", "dependency"),

		descriptors:      desc(serviceplane, "client_descriptors", "Descriptors of this process that clients use. IP families may share them.", labelFamily),
		descriptorLimit:  desc(serviceplane, "client_descriptors_limit", "How many descriptors clients may use.", labelFamily),
		descriptorLosses: desc(serviceplane, "client_descriptors_short_total", "Clients that were refused for lack of descriptors, or ended so that others get theirs.", "what", labelFamily),
		reachable:        desc(serviceplane, "apiserver_reachable", "1 if the API server answered the last request, 0 if not."),
		unreached:        desc(serviceplane, "apiserver_failures_total", "Requests without an answer of the API server, or answered with 401, 429 or 5xx."),
	}
}

// Describe implements prometheus.Collector.
func (p *present) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		p.endpointsPending, p.endpointsTotal, p.servicesPending, p.servicesTotal, p.lastQueued,
		p.setAside, p.pending, p.ports, p.failed, p.damages, p.condition, p.without,
		p.descriptors, p.descriptorLimit, p.descriptorLosses,
		p.reachable, p.unreached,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (p *present) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	}
	if reachable := p.metrics.apiServer.Load(); reachable != nil {
		now, failures := (*reachable)()
		send(p.reachable, prometheus.GaugeValue, map[bool]float64{true: 1}[now])
		send(p.unreached, prometheus.CounterValue, float64(failures))
	}
	if status := p.metrics.status.Load(); status != nil {
		p.collect((*status)(), send)
	}
}

// collect sends what the Status says.
func (p *present) collect(s proxier.Status, send func(*prometheus.Desc, prometheus.ValueType, float64, ...string)) {
	send(p.endpointsPending, prometheus.GaugeValue, float64(s.Tracked.PendingEndpointSlices))
	send(p.endpointsTotal, prometheus.CounterValue, float64(s.Tracked.EndpointSlices))
	send(p.servicesPending, prometheus.GaugeValue, float64(s.Tracked.PendingServices))
	send(p.servicesTotal, prometheus.CounterValue, float64(s.Tracked.Services))
	now := time.Now()
	for name, f := range s.Families {
		family := string(name)
		queued, waiting := 0.0, 0.0
		if !s.LastQueued.IsZero() {
			queued = seconds(s.LastQueued)
		}
		if !f.PendingSince.IsZero() {
			waiting = now.Sub(f.PendingSince).Seconds()
		}
		send(p.lastQueued, prometheus.GaugeValue, queued, family)
		send(p.pending, prometheus.GaugeValue, waiting, family)
		send(p.ports, prometheus.GaugeValue, float64(f.ServicePorts), family)
		send(p.failed, prometheus.GaugeValue, float64(len(f.Failed)), family)
		send(p.damages, prometheus.CounterValue, float64(f.Damaged), family)
		if d := f.Descriptors; d.Limit > 0 {
			send(p.descriptors, prometheus.GaugeValue, float64(d.Used), family)
			send(p.descriptorLimit, prometheus.GaugeValue, float64(d.Limit), family)
			send(p.descriptorLosses, prometheus.CounterValue, float64(d.Refused), "refused", family)
			send(p.descriptorLosses, prometheus.CounterValue, float64(d.Ended), "ended", family)
		}
	}
	for reason, count := range setAside(s.Problems) {
		send(p.setAside, prometheus.GaugeValue, float64(count), string(reason))
	}
	for c := range kinds(s.Conditions) {
		send(p.condition, prometheus.GaugeValue, 1, c.Type, string(c.Family))
	}
	for _, dependency := range s.Without {
		send(p.without, prometheus.GaugeValue, 1, dependency)
	}
}

// setAside counts problems by reason; a reason without any counts too.
func setAside(problems []changetracker.Problem) map[changetracker.Reason]int {
	counts := map[changetracker.Reason]int{}
	for _, reason := range changetracker.Reasons() {
		counts[reason] = 0
	}
	for i := range problems {
		counts[problems[i].Reason]++
	}
	return counts
}

// kind is a condition without its story.
type kind struct {
	Type   string
	Family v1.IPFamily
}

// kinds are the conditions, each once: two Services may have the same.
func kinds(conditions []proxier.Condition) map[kind]bool {
	all := map[kind]bool{}
	for i := range conditions {
		all[kind{conditions[i].Type, conditions[i].Family}] = true
	}
	return all
}
