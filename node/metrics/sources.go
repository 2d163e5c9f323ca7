package metrics

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/node/canary"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/node/leastconnections"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Sources are functions that each scrape calls, perhaps several scrapes at once. The metrics of a
// nil one are missing.
type Sources struct {
	// Status is the Provider's.
	Status func() proxier.Status
	// APIServer reports whether the API server answers, and how often it did not:
	// informer.Link.Reachable.
	APIServer func() (reachable bool, failures uint64)
	// Counts returns the numbers of connections: Proxier.Counts, with Config.CountConnections or
	// Config.CountTraffic. What is not counted has no metric. See Options.MaxCounted.
	Counts func(context.Context, v1.IPFamily) (connection.Counts, error)
	// Canary returns the results of a canary: canary.Canary.Status.
	Canary func() map[v1.IPFamily]canary.TestStatus
	// EndpointHealth returns the results of health checks: endpointhealth.Checker.Status.
	EndpointHealth func() endpointhealth.Summary
	// LeastConnections returns what a Balancer does: leastconnections.Balancer.Readings.
	LeastConnections func() leastconnections.Readings
	// Sockets returns numbers of sockets: Engine.SocketCounts of package ebpf. After an error, a
	// scrape lacks them.
	Sockets func(v1.IPFamily) (connection.SocketCounts, error)
	// Forwarded returns how many packets were forwarded past the rules, and how many of them to the
	// other end of a veth: Engine.ForwardCounts of package ebpf. An error means that there are none.
	Forwarded func(v1.IPFamily) (packets, toPeer uint64, err error)
	// LocalhostNodePorts and Invalid read the kernel's counts of packets: those of
	// iptables.Counters. While one returns false, its metric is missing.
	LocalhostNodePorts, Invalid func() (packets uint64, ok bool)
}

// Watch replaces the sources.
func (m *Metrics) Watch(s Sources) { m.scraped.sources.Store(&s) }

// scraped collects the metrics that each scrape reads from the Sources of the last Watch.
type scraped struct {
	sources atomic.Pointer[Sources]
	descs   []*prometheus.Desc
	reads   []func(from *Sources, out sink)
}

// newScraped has all of these metrics. Those of a source that is nil are missing in a scrape.
func newScraped(o *Options) *scraped {
	s := &scraped{}
	s.sources.Store(&Sources{})
	s.ofStatus()
	s.ofPackets()
	s.ofCanary()
	s.ofHealth()
	s.ofLeastConnections()
	s.ofSockets(o.Families)
	s.ofCounts(o)
	return s
}

// sink takes the metrics of a scrape.
type sink = chan<- prometheus.Metric

// metric sends a value.
type metric func(out sink, value float64, labels ...string)

func (s *scraped) gauge(name, help string, labels ...string) metric {
	return s.metric(prometheus.GaugeValue, name, help, labels)
}

func (s *scraped) counter(name, help string, labels ...string) metric {
	return s.metric(prometheus.CounterValue, name, help, labels)
}

func (s *scraped) metric(kind prometheus.ValueType, name, help string, labels []string) metric {
	desc := prometheus.NewDesc(name, help, labels, nil)
	s.descs = append(s.descs, desc)
	return func(out sink, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, kind, value, labels...)
	}
}

// read adds what a scrape does.
func (s *scraped) read(read func(from *Sources, out sink)) { s.reads = append(s.reads, read) }

// Describe implements prometheus.Collector.
func (s *scraped) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range s.descs {
		out <- desc
	}
}

// Collect implements prometheus.Collector.
func (s *scraped) Collect(out chan<- prometheus.Metric) {
	from := s.sources.Load()
	var reading sync.WaitGroup // a slow source does not delay others
	for _, read := range s.reads {
		reading.Go(func() { read(from, out) })
	}
	reading.Wait()
}

// ofCanary has the results of a canary.
func (s *scraped) ofCanary() {
	passing := s.gauge("serviceplane_canary_passing", "1 while the canary's connections through the proxy's rules reach their endpoint, 0 while they fail; absent before the first result, and where the node cannot test.", labelFamily)
	tests := s.counter("serviceplane_canary_tests_total", "Connections of the canary through the proxy's rules, by result: passed or failed.", labelFamily, labelResult)
	success := s.gauge("serviceplane_canary_last_success_timestamp_seconds", "Time when the canary's last successful test ended; 0 if none did.", labelFamily)
	duration := s.gauge("serviceplane_canary_duration_seconds", "Duration of the canary's last successful test.", labelFamily)
	s.read(func(from *Sources, out sink) {
		if from.Canary == nil {
			return
		}
		for name, c := range from.Canary() {
			family := string(name)
			if c.State == canary.StatePassing || c.State == canary.StateFailing { // untested is no fault
				passing(out, oneIf(c.State == canary.StatePassing), family)
			}
			tests(out, float64(c.Passed), family, "passed")
			tests(out, float64(c.Failed), family, "failed")
			success(out, seconds(c.LastSuccess), family)
			duration(out, c.Took.Seconds(), family)
		}
	})
}

// ofHealth has the results of health checks.
func (s *scraped) ofHealth() {
	const prefix = "serviceplane_endpoint_health_"
	endpoints := s.gauge(prefix+"endpoints", "Endpoints whose health is checked, each counted once for all service ports that agree how; state failing is a part of state checked.", labelState)
	unusual := s.gauge(prefix+"service_endpoints", "Endpoints of service ports that get no connections (ejected), that fail and get them because too many others are ejected (kept), or that do not get their whole share yet (starting).", labelState)
	checks := s.counter(prefix+"checks_total", "Health checks that ended, by result: passed, failed, or untested for a reason on this node.", labelResult)
	changes := s.counter(prefix+"changes_total", "Endpoints of service ports that health checks ejected, or that returned.", "change")
	syncs := s.counter(prefix+"syncs_total", "Syncs that health checks requested.")
	refused := s.gauge(prefix+"refused", "Service ports that are not checked because what chooses their health check is invalid.")
	late := s.gauge(prefix+"late", "Health checks that are due and wait for others to end.")
	s.read(func(from *Sources, out sink) {
		if from.EndpointHealth == nil {
			return
		}
		h := from.EndpointHealth()
		endpoints(out, float64(h.Endpoints), "checked")
		endpoints(out, float64(h.Failing), "failing")
		unusual(out, float64(h.Ejected), endpointhealth.StateEjected.String())
		unusual(out, float64(h.Kept), endpointhealth.StateKept.String())
		unusual(out, float64(h.Starting), endpointhealth.StateStarting.String())
		checks(out, float64(h.Passed), "passed")
		checks(out, float64(h.Failures), "failed")
		checks(out, float64(h.Untested), "untested")
		changes(out, float64(h.Ejections), "ejected")
		changes(out, float64(h.Returns), "returned")
		syncs(out, float64(h.Syncs))
		refused(out, float64(h.Refused))
		late(out, float64(h.Late))
	})
}

// ofSockets has the numbers of sockets, and of packets past the rules. An error of a source means that nothing
// is attached.
func (s *scraped) ofSockets(families []v1.IPFamily) {
	translated := s.counter("serviceplane_sockets_translated_total", "Sockets that connected to a Service and were translated to an endpoint, without NAT.", labelFamily)
	ended := s.counter("serviceplane_sockets_ended_total", "Connected UDP sockets that were ended because their endpoint was gone.", labelFamily)
	left := s.counter("serviceplane_sockets_left_to_rules_total", "Sockets that connected to a frontend which sockets have, and were left to the rules, by reason: namespace, bound, empty or no_memory.", labelFamily, "reason")
	forwarded := s.counter("serviceplane_forward_packets_total", "Packets of established flows that were forwarded past the rules, to a network device or to the other end of a veth at once (peer).", labelFamily, "to")
	s.read(func(from *Sources, out sink) {
		for _, family := range families {
			if from.Sockets == nil {
				break
			}
			n, err := from.Sockets(family)
			if err != nil {
				continue
			}
			translated(out, float64(n.Translated), string(family))
			ended(out, float64(n.Ended), string(family))
			for reason, sockets := range map[string]uint64{"namespace": n.Namespace, "bound": n.Bound, "empty": n.Empty, "no_memory": n.NoMemory} {
				left(out, float64(sockets), string(family), reason)
			}
		}
	})
	s.read(func(from *Sources, out sink) {
		for _, family := range families {
			if from.Forwarded == nil {
				break
			}
			if packets, toPeer, err := from.Forwarded(family); err == nil {
				forwarded(out, float64(packets-toPeer), string(family), "device")
				forwarded(out, float64(toPeer), string(family), "peer")
			}
		}
	})
}

// ofLeastConnections has what a Balancer does. Without a service port that it balances there is nothing.
func (s *scraped) ofLeastConnections() {
	const prefix = "serviceplane_least_connections_"
	ports := s.gauge(prefix+"service_ports", "Service ports with policy least-connections, by state: balanced by the weights of their endpoints, or at random, because they have too many or others change their weights.", labelState)
	connections := s.gauge(prefix+"connections", "Open connections through this node to their endpoints, at the last reading.")
	readings := s.counter(prefix+"readings_total", "Readings of the open connections, by result: passed or failed.", labelResult)
	changes := s.counter(prefix+"changes_total", "Overrides of weights of endpoints that were changed.")
	duration := s.gauge(prefix+"duration_seconds", "Duration of the last reading.")
	s.read(func(from *Sources, out sink) {
		if from.LeastConnections == nil {
			return
		}
		b := from.LeastConnections()
		if b.Passed+b.Failed == 0 {
			return
		}
		ports(out, float64(b.Ports-b.AtRandom), "balanced")
		ports(out, float64(b.AtRandom), "at random")
		connections(out, float64(b.Connections))
		readings(out, float64(b.Passed), "passed")
		readings(out, float64(b.Failed), "failed")
		changes(out, float64(b.Overrides))
		duration(out, b.Took.Seconds())
	})
}
