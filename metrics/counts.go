package metrics

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/connection"
)

const (
	// countsTimeout is how long a scrape waits for the numbers of connections.
	countsTimeout = 5 * time.Second
	// defaultCounted is the default of Options.MaxCounted.
	defaultCounted = 1000
	// others is the label of the service ports without a series. No Service has it with an
	// empty namespace.
	others = "others"
)

// numbers of a service port, in the order of countCollector.numbers.
const (
	connectionsOf = iota
	packetsIn
	packetsOut
	bytesIn
	bytesOut
	kindsOfNumbers
)

type numbers [kindsOfNumbers]uint64

func numbersOf(p *connection.ServicePortCounts) numbers {
	return numbers{p.Connections, p.Traffic.PacketsIn, p.Traffic.PacketsOut, p.Traffic.BytesIn, p.Traffic.BytesOut}
}

// countCollector collects the numbers of service ports at each scrape.
type countCollector struct {
	connections, packets, bytes, losses *prometheus.Desc
	sources                             *sources
	families                            []v1.IPFamily
	most                                int // series of service ports, in each family

	mu       sync.Mutex // guards all below
	byFamily map[v1.IPFamily]*countSeries
}

// countSeries are the series of a family. A service port stays where it was first.
type countSeries struct {
	own   map[changetracker.ServicePortName]bool
	other map[changetracker.ServicePortName]numbers // and the numbers that are in the sum
	sum   numbers
}

func newCountCollector(s *sources, o *Options) *countCollector {
	const service = "service"
	labels := []string{labelFamily, labelNamespace, labelService, labelPort, labelProtocol}
	const rest = "; service others is the sum of the service ports that have no series of their own."
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(serviceplane, "", name), help, labels, nil)
	}
	c := &countCollector{
		connections: desc(service+"_new_connections_total", "New connections to a service port that were sent to an endpoint"+rest, labels...),
		packets:     desc(service+"_traffic_packets_total", "Packets of a service port to its endpoints (in) and from them (out)"+rest, append(labels, labelDirection)...),
		bytes:       desc(service+"_traffic_bytes_total", "Bytes of a service port to its endpoints (in) and from them (out)"+rest, append(labels, labelDirection)...),
		losses:      desc("traffic_losses_total", "How often the kernel dropped notifications of connections that had ended; each time, some traffic was not counted."),
		sources:     s,
		families:    o.Families,
		most:        o.MaxCounted,
		byFamily:    map[v1.IPFamily]*countSeries{},
	}
	for _, family := range o.Families {
		c.byFamily[family] = &countSeries{own: map[changetracker.ServicePortName]bool{}, other: map[changetracker.ServicePortName]numbers{}}
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *countCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.connections, c.packets, c.bytes, c.losses} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *countCollector) Collect(out chan<- prometheus.Metric) {
	read := c.sources.now().Counts
	if read == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), countsTimeout) //nolint:forbidigo // a scrape has none
	defer cancel()
	losses, traffic := uint64(0), false
	for _, family := range c.families {
		counts, err := read(ctx, family)
		if err != nil {
			continue // the engine cannot count, or the next scrape has the numbers
		}
		traffic, losses = traffic || counts.Traffic, max(losses, counts.TrafficLosses)
		c.byFamily[family].update(&counts, c.most, func(n changetracker.ServicePortName, values numbers) {
			c.send(out, family, n, values, &counts)
		})
	}
	if traffic {
		out <- prometheus.MustNewConstMetric(c.losses, prometheus.CounterValue, float64(losses))
	}
}

// send sends the numbers of a service port that are known: engines that count no connections have
// none, and some count bytes but no packets.
func (c *countCollector) send(out chan<- prometheus.Metric, family v1.IPFamily, n changetracker.ServicePortName, values numbers, counts *connection.Counts) {
	labels := []string{string(family), n.Namespace, n.Name, n.Port, string(n.Protocol)}
	one := func(desc *prometheus.Desc, value uint64, more ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(value), append(labels, more...)...)
	}
	if counts.Connections {
		one(c.connections, values[connectionsOf])
	}
	hasBytes, hasPackets := values[bytesIn]+values[bytesOut] > 0, values[packetsIn]+values[packetsOut] > 0
	if hasBytes || counts.Traffic {
		one(c.bytes, values[bytesIn], "in")
		one(c.bytes, values[bytesOut], "out")
	}
	if hasPackets || counts.Traffic && !hasBytes {
		one(c.packets, values[packetsIn], "in")
		one(c.packets, values[packetsOut], "out")
	}
}

// update sends the series. No series falls while its service port exists, nor does their sum
// because a service port gets another series.
func (s *countSeries) update(counts *connection.Counts, most int, send func(changetracker.ServicePortName, numbers)) {
	exist := make(map[changetracker.ServicePortName]bool, len(counts.ServicePorts))
	for i := range counts.ServicePorts {
		exist[counts.ServicePorts[i].Name] = true
	}
	for name := range s.own {
		if !exist[name] {
			delete(s.own, name)
		}
	}
	for name := range s.other {
		if !exist[name] {
			delete(s.other, name)
		}
	}
	for i := range counts.ServicePorts {
		p := &counts.ServicePorts[i]
		last, isOther := s.other[p.Name]
		if !isOther && (s.own[p.Name] || len(s.own) < most) {
			s.own[p.Name] = true
			send(p.Name, numbersOf(p))
			continue
		}
		now := numbersOf(p)
		for kind := range now {
			if now[kind] < last[kind] { // it has moved to another engine
				last[kind] = 0
			}
			s.sum[kind] += now[kind] - last[kind]
		}
		s.other[p.Name] = now
	}
	if s.sum != (numbers{}) {
		send(changetracker.ServicePortName{NamespacedName: types.NamespacedName{Name: others}}, s.sum)
	}
}
