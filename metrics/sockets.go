package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
)

// Sockets are numbers of sockets of an IP family that have connected to a frontend which sockets have, in mode
// "ebpf". They only grow, until what counts them is removed; Ended begins anew with the process.
type Sockets struct {
	// Translated sockets go to an endpoint.
	Translated uint64
	// Left to the rules, by reason.
	Left map[string]uint64
	// Ended are UDP sockets that were ended because their endpoint was gone.
	Ended uint64
}

// socketCollector collects the numbers of sockets at each scrape.
type socketCollector struct {
	sources  *sources
	families []v1.IPFamily

	translated, ended, left, forwarded *prometheus.Desc
}

func newSocketCollector(s *sources, families []v1.IPFamily) *socketCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(serviceplane, "sockets", name), help, labels, nil)
	}
	return &socketCollector{
		sources:    s,
		families:   families,
		translated: desc("translated_total", "Sockets that connected to a Service and were translated to an endpoint, without NAT.", labelFamily),
		ended:      desc("ended_total", "Connected UDP sockets that were ended because their endpoint was gone.", labelFamily),
		forwarded:  prometheus.NewDesc(prometheus.BuildFQName(serviceplane, "forward", "packets_total"), "Packets of established flows that were forwarded past the rules, to a network device or to the other end of a veth at once (peer).", []string{labelFamily, "to"}, nil),
		left:       desc("left_to_rules_total", "Sockets that connected to a frontend which sockets have, and were left to the rules, by reason: namespace, bound, empty or no_memory.", labelFamily, "reason"),
	}
}

// Describe implements prometheus.Collector.
func (c *socketCollector) Describe(out chan<- *prometheus.Desc) {
	out <- c.translated
	out <- c.ended
	out <- c.left
	out <- c.forwarded
}

// Collect implements prometheus.Collector.
func (c *socketCollector) Collect(out chan<- prometheus.Metric) {
	now := c.sources.now()
	if now.Sockets != nil {
		c.collectSockets(out, now)
	}
	if now.Forwarded == nil {
		return
	}
	for _, family := range c.families {
		packets, toPeer, err := now.Forwarded(family)
		if err != nil {
			continue // nothing is attached
		}
		out <- prometheus.MustNewConstMetric(c.forwarded, prometheus.CounterValue, float64(packets-toPeer), string(family), "device")
		out <- prometheus.MustNewConstMetric(c.forwarded, prometheus.CounterValue, float64(toPeer), string(family), "peer")
	}
}

func (c *socketCollector) collectSockets(out chan<- prometheus.Metric, now *Sources) {
	for _, family := range c.families {
		n, err := now.Sockets(family)
		if err != nil {
			continue // nothing is attached
		}
		out <- prometheus.MustNewConstMetric(c.translated, prometheus.CounterValue, float64(n.Translated), string(family))
		out <- prometheus.MustNewConstMetric(c.ended, prometheus.CounterValue, float64(n.Ended), string(family))
		for reason, left := range n.Left {
			out <- prometheus.MustNewConstMetric(c.left, prometheus.CounterValue, float64(left), string(family), reason)
		}
	}
}
