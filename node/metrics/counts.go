package metrics

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier/connection"
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

// numbers of a service port, in the order of numbersOf.
const (
	connectionsOf = iota
	packetsIn
	packetsOut
	bytesIn
	bytesOut
	refusedOf
	kindsOfNumbers
)

type numbers [kindsOfNumbers]uint64

func numbersOf(p *connection.ServicePortCounts) numbers {
	return numbers{p.Connections, p.Traffic.PacketsIn, p.Traffic.PacketsOut, p.Traffic.BytesIn, p.Traffic.BytesOut, p.Refused}
}

// counted collects the numbers of service ports.
type counted struct {
	connections, refused, packets, bytes metric
	families                             []v1.IPFamily
	most                                 int // series of service ports, in each family

	mu       sync.Mutex // guards all below
	byFamily map[v1.IPFamily]*countSeries
}

// countSeries are the series of a family. A service port stays where it was first.
type countSeries struct {
	own   map[changetracker.ServicePortName]bool
	other map[changetracker.ServicePortName]numbers // and the numbers that are in the sum
	sum   numbers
}

// ofCounts has the numbers of service ports.
func (s *scraped) ofCounts(o *Options) {
	labels := []string{labelFamily, labelNamespace, labelService, labelPort, labelProtocol}
	directed := append(slices.Clip(labels), labelDirection)
	const rest = "; service others is the sum of the service ports that have no series of their own."
	c := &counted{
		connections: s.counter("serviceplane_service_new_connections_total", "New connections to a service port that were sent to an endpoint"+rest, labels...),
		refused:     s.counter("serviceplane_service_refused_connections_total", "New connections to a service port that its client limit has refused"+rest, labels...),
		packets:     s.counter("serviceplane_service_traffic_packets_total", "Packets of a service port to its endpoints (in) and from them (out)"+rest, directed...),
		bytes:       s.counter("serviceplane_service_traffic_bytes_total", "Bytes of a service port to its endpoints (in) and from them (out)"+rest, directed...),
		families:    o.Families,
		most:        o.MaxCounted,
		byFamily:    map[v1.IPFamily]*countSeries{},
	}
	for _, family := range o.Families {
		c.byFamily[family] = &countSeries{own: map[changetracker.ServicePortName]bool{}, other: map[changetracker.ServicePortName]numbers{}}
	}
	losses := s.counter("serviceplane_traffic_losses_total", "How often the kernel dropped notifications of connections that had ended; each time, some traffic was not counted.")
	s.read(func(from *Sources, out sink) {
		if from.Counts == nil {
			return
		}
		if lost, traffic := c.collect(from, out); traffic {
			losses(out, float64(lost))
		}
	})
}

// collect sends the numbers of all families. It returns the losses, if an engine counts traffic.
func (c *counted) collect(from *Sources, out sink) (losses uint64, traffic bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), countsTimeout) //nolint:forbidigo // a scrape has none
	defer cancel()
	for _, family := range c.families {
		counts, err := from.Counts(ctx, family)
		if err != nil {
			continue // the engine cannot count, or the next scrape has the numbers
		}
		traffic, losses = traffic || counts.Traffic, max(losses, counts.TrafficLosses)
		c.byFamily[family].update(&counts, c.most, func(n changetracker.ServicePortName, values numbers) {
			c.send(out, family, n, values, &counts)
		})
	}
	return losses, traffic
}

// send sends the numbers of a service port that are known: engines that count no connections have
// none, and some count bytes but no packets.
func (c *counted) send(out sink, family v1.IPFamily, n changetracker.ServicePortName, values numbers, counts *connection.Counts) {
	labels := []string{string(family), n.Namespace, n.Name, n.Port, string(n.Protocol)}
	if counts.Connections {
		c.connections(out, float64(values[connectionsOf]), labels...)
	}
	if values[refusedOf] > 0 {
		c.refused(out, float64(values[refusedOf]), labels...)
	}
	both := func(send metric, in, back uint64) {
		send(out, float64(in), append(labels, "in")...)
		send(out, float64(back), append(labels, "out")...)
	}
	hasBytes, hasPackets := values[bytesIn]+values[bytesOut] > 0, values[packetsIn]+values[packetsOut] > 0
	if hasBytes || counts.Traffic {
		both(c.bytes, values[bytesIn], values[bytesOut])
	}
	if hasPackets || counts.Traffic && !hasBytes {
		both(c.packets, values[packetsIn], values[packetsOut])
	}
}

// update sends the series. No series falls while its service port exists, nor does their sum
// because a service port gets another series.
func (s *countSeries) update(counts *connection.Counts, most int, send func(changetracker.ServicePortName, numbers)) {
	exist := make(map[changetracker.ServicePortName]bool, len(counts.ServicePorts))
	for i := range counts.ServicePorts {
		exist[counts.ServicePorts[i].Name] = true
	}
	maps.DeleteFunc(s.own, func(name changetracker.ServicePortName, _ bool) bool { return !exist[name] })
	maps.DeleteFunc(s.other, func(name changetracker.ServicePortName, _ numbers) bool { return !exist[name] })
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
