package metrics

import (
	"sync/atomic"

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

// SocketCounts returns the numbers of an IP family. After an error, a scrape lacks them.
type SocketCounts func(family v1.IPFamily) (Sockets, error)

// socketCollector collects the numbers of sockets at each scrape.
type socketCollector struct {
	counts   atomic.Pointer[SocketCounts]
	forwards atomic.Pointer[ForwardCounts]
	families []v1.IPFamily

	translated, ended, left, forwarded *prometheus.Desc
}

func newSocketCollector(families []v1.IPFamily) *socketCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(serviceplane, "sockets", name), help, labels, nil)
	}
	return &socketCollector{
		families:   families,
		translated: desc("translated_total", "Sockets that connected to a Service and were translated to an endpoint, without NAT.", labelFamily),
		ended:      desc("ended_total", "Connected UDP sockets that were ended because their endpoint was gone.", labelFamily),
		forwarded:  prometheus.NewDesc(prometheus.BuildFQName(serviceplane, "forward", "packets_total"), "Packets of established flows that were forwarded past the rules, to a network device or to the other end of a veth at once (peer).", []string{labelFamily, "to"}, nil),
		left:       desc("left_to_rules_total", "Sockets that connected to a frontend which sockets have, and were left to the rules, by reason: namespace, bound, empty or no_memory.", labelFamily, "reason"),
	}
}

// WatchSockets sets the function that returns the numbers of sockets: Engine.SocketCounts of package
// ebpf. Without it, those metrics are missing.
func (m *Metrics) WatchSockets(counts SocketCounts) { m.sockets.counts.Store(&counts) }

// ForwardCounts returns how many packets of an IP family were forwarded past the rules, and how many
// of them to the other end of a veth. An error means that there are none. It may be called at any time.
type ForwardCounts func(v1.IPFamily) (packets, toPeer uint64, err error)

// WatchForward sets the function that returns the numbers of packets: Engine.ForwardCounts of package
// ebpf. Without it, that metric is missing.
func (m *Metrics) WatchForward(counts ForwardCounts) { m.sockets.forwards.Store(&counts) }

// Describe implements prometheus.Collector.
func (c *socketCollector) Describe(out chan<- *prometheus.Desc) {
	out <- c.translated
	out <- c.ended
	out <- c.left
	out <- c.forwarded
}

// Collect implements prometheus.Collector.
func (c *socketCollector) Collect(out chan<- prometheus.Metric) {
	c.collectSockets(out)
	counts := c.forwards.Load()
	if counts == nil {
		return
	}
	for _, family := range c.families {
		packets, toPeer, err := (*counts)(family)
		if err != nil {
			continue // nothing is attached
		}
		out <- prometheus.MustNewConstMetric(c.forwarded, prometheus.CounterValue, float64(packets-toPeer), string(family), "device")
		out <- prometheus.MustNewConstMetric(c.forwarded, prometheus.CounterValue, float64(toPeer), string(family), "peer")
	}
}

func (c *socketCollector) collectSockets(out chan<- prometheus.Metric) {
	counts := c.counts.Load()
	if counts == nil {
		return
	}
	for _, family := range c.families {
		n, err := (*counts)(family)
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
