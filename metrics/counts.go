package metrics

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

const (
	// countsTimeout is how long a scrape waits for the numbers of connections.
	countsTimeout = 5 * time.Second
	// defaultCounted is the default of WatchCounts.
	defaultCounted = 1000
	// others is the label of the service ports without a series. No Service has it with an
	// empty namespace.
	others = "others"
)

// Counts returns the numbers of connections of an IP family: Proxier.Counts of package proxier.
type Counts func(context.Context, v1.IPFamily) (proxier.Counts, error)

// countCollector collects the numbers of connections of service ports at each scrape.
type countCollector struct {
	connections *prometheus.Desc
	families    []v1.IPFamily

	mu       sync.Mutex // guards all below
	read     Counts     // nil: none
	most     int        // series of service ports, in each family
	byFamily map[v1.IPFamily]*countSeries
}

// countSeries are the series of a family. A service port stays where it was first.
type countSeries struct {
	own   map[changetracker.ServicePortName]bool
	other map[changetracker.ServicePortName]uint64 // and the number that is in the sum
	sum   uint64
}

func newCountCollector(families []v1.IPFamily) *countCollector {
	c := &countCollector{
		connections: prometheus.NewDesc(prometheus.BuildFQName(serviceplane, "", "service_new_connections_total"),
			"New connections to a service port that were sent to an endpoint; service others is the sum of the service ports that have no series of their own.",
			[]string{labelFamily, labelNamespace, labelService, labelPort, labelProtocol}, nil),
		families: families,
		byFamily: map[v1.IPFamily]*countSeries{},
	}
	for _, family := range families {
		c.byFamily[family] = &countSeries{own: map[changetracker.ServicePortName]bool{}, other: map[changetracker.ServicePortName]uint64{}}
	}
	return c
}

// WatchCounts sets the function that returns the numbers of connections: Proxier.Counts, with
// Config.CountConnections. Without it, that metric is missing. In each IP family, the first
// service ports that get connections have a series of their own, as many as most says; the
// others share one. most is 1000 if it is 0 or less.
func (m *Metrics) WatchCounts(counts Counts, most int) {
	if most <= 0 {
		most = defaultCounted
	}
	m.counts.mu.Lock()
	defer m.counts.mu.Unlock()
	m.counts.read, m.counts.most = counts, most
}

// Describe implements prometheus.Collector.
func (c *countCollector) Describe(out chan<- *prometheus.Desc) { out <- c.connections }

// Collect implements prometheus.Collector.
func (c *countCollector) Collect(out chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.read == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), countsTimeout) //nolint:forbidigo // a scrape has none
	defer cancel()
	for _, family := range c.families {
		counts, err := c.read(ctx, family)
		if err != nil {
			continue // the engine cannot count, or the next scrape has the numbers
		}
		send := func(n changetracker.ServicePortName, value uint64) {
			out <- prometheus.MustNewConstMetric(c.connections, prometheus.CounterValue, float64(value),
				string(family), n.Namespace, n.Name, n.Port, string(n.Protocol))
		}
		c.byFamily[family].update(&counts, c.most, send)
	}
}

// update sends the series. No series falls while its service port exists, nor does their sum
// because a service port gets another series.
func (s *countSeries) update(counts *proxier.Counts, most int, send func(changetracker.ServicePortName, uint64)) {
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
			send(p.Name, p.Connections)
			continue
		}
		if p.Connections < last { // it has moved to another engine
			last = 0
		}
		s.sum += p.Connections - last
		s.other[p.Name] = p.Connections
	}
	if s.sum > 0 {
		send(changetracker.ServicePortName{NamespacedName: types.NamespacedName{Name: others}}, s.sum)
	}
}
