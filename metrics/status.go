package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// statusCollector collects the metrics that are read from the Status at each scrape.
type statusCollector struct {
	sources *sources

	endpointsPending, endpointsTotal, servicesPending, servicesTotal, lastQueued *prometheus.Desc

	setAside, pending, ports, failed, damages, condition, without *prometheus.Desc

	descriptors, descriptorLimit, descriptorLosses *prometheus.Desc
	ending, ended                                  *prometheus.Desc
	reachable, unreached                           *prometheus.Desc
	localhostNodePorts, invalid                    *prometheus.Desc
}

func newStatusCollector(s *sources) *statusCollector {
	desc := func(namespace, name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
	}
	return &statusCollector{
		sources:          s,
		endpointsPending: desc(kubeProxy, "sync_proxy_rules_endpoint_changes_pending", "Changes of EndpointSlices that are not programmed yet."),
		endpointsTotal:   desc(kubeProxy, "sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices received."),
		servicesPending:  desc(kubeProxy, "sync_proxy_rules_service_changes_pending", "Services with changes that are not programmed yet."),
		servicesTotal:    desc(kubeProxy, "sync_proxy_rules_service_changes_total", "Changes of Services received."),
		lastQueued:       desc(kubeProxy, "sync_proxy_rules_last_queued_timestamp_seconds", "Time of the last request for a sync.", labelFamily),
		setAside:         desc(serviceplane, "values_set_aside", "Values of API objects that are ignored because they are invalid or not supported, by reason.", "reason"),
		pending:          desc(serviceplane, "pending_seconds", "Age of the oldest change that is not programmed yet; 0 if there is none.", labelFamily),
		ports:            desc(serviceplane, "service_ports", "Programmed service ports.", labelFamily),
		failed:           desc(serviceplane, "service_ports_failed", "Service ports that the last sync could not program completely.", labelFamily),
		damages:          desc(serviceplane, "damages_total", "Detected changes of the proxy's kernel objects by other programs.", labelFamily),
		condition:        desc(serviceplane, "condition", "1 while the condition holds; a condition needs an operator's attention.", "type", labelFamily),
		without:          desc(serviceplane, "dependency_missing", "1 for each dependency that the program does not give the proxy, although packets may need it.", "dependency"),

		descriptors:      desc(serviceplane, "client_descriptors", "Descriptors of this process that clients hold. IP families may share them.", labelFamily),
		descriptorLimit:  desc(serviceplane, "client_descriptors_limit", "Descriptors that clients may hold.", labelFamily),
		descriptorLosses: desc(serviceplane, "client_descriptors_short_total", "Clients refused for lack of descriptors, or ended to give their descriptors to others.", "what", labelFamily),
		ending:           desc(serviceplane, "connections_ending", "TCP connections to endpoints that are gone, whose clients have not received a RST yet.", labelFamily),
		ended:            desc(serviceplane, "connections_ended_total", "TCP connections to endpoints that are gone, whose clients have received a RST.", labelFamily),
		reachable:        desc(serviceplane, "apiserver_reachable", "1 if the API server answered the last request, 0 if not."),
		unreached:        desc(serviceplane, "apiserver_failures_total", "Requests that the API server did not answer, or answered with 401, 429 or 5xx."),

		localhostNodePorts: desc(kubeProxy, "iptables_localhost_nodeports_accepted_packets_total", "Connections accepted at node ports of loopback addresses."),
		invalid:            desc(kubeProxy, "iptables_ct_state_invalid_dropped_packets_total", "Packets dropped because connection tracking has no valid state for them."),
	}
}

// Describe implements prometheus.Collector.
func (p *statusCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		p.endpointsPending, p.endpointsTotal, p.servicesPending, p.servicesTotal, p.lastQueued,
		p.setAside, p.pending, p.ports, p.failed, p.damages, p.condition, p.without,
		p.descriptors, p.descriptorLimit, p.descriptorLosses, p.ending, p.ended,
		p.reachable, p.unreached, p.localhostNodePorts, p.invalid,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (p *statusCollector) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	}
	now := p.sources.now()
	if now.APIServer != nil {
		reachable, failures := now.APIServer()
		send(p.reachable, prometheus.GaugeValue, map[bool]float64{true: 1}[reachable])
		send(p.unreached, prometheus.CounterValue, float64(failures))
	}
	for desc, read := range map[*prometheus.Desc]func() (uint64, bool){p.localhostNodePorts: now.LocalhostNodePorts, p.invalid: now.Invalid} {
		if read == nil {
			continue
		}
		if packets, ok := read(); ok {
			send(desc, prometheus.CounterValue, float64(packets))
		}
	}
	if now.Status != nil {
		p.collect(now.Status(), send)
	}
}

// collect sends the metrics of a Status.
func (p *statusCollector) collect(s proxier.Status, send func(*prometheus.Desc, prometheus.ValueType, float64, ...string)) {
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
		send(p.ending, prometheus.GaugeValue, float64(f.ConnectionsEnding), family)
		send(p.ended, prometheus.CounterValue, float64(f.ConnectionsEnded), family)
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

// setAside counts problems by reason; it contains every reason.
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

// kind is a condition without its details.
type kind struct {
	Type   string
	Family v1.IPFamily
}

// kinds returns the kinds of conditions without repetition: two Services may have the
// same condition.
func kinds(conditions []proxier.Condition) map[kind]bool {
	all := map[kind]bool{}
	for i := range conditions {
		all[kind{conditions[i].Type, conditions[i].Family}] = true
	}
	return all
}
