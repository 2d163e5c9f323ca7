package nftables

import (
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// BenchmarkStalls measures what the smallest transactions of another program take that writes a table each millisecond, and how
// long each kind of change takes beside that program: nf_tables processes one transaction at a time per network namespace. It
// also measures a change of one endpoint that follows, and one of another Kubernetes namespace that comes meanwhile.
func BenchmarkStalls(b *testing.B) {
	services := 500
	if os.Getenv(benchFull) == "1" {
		services = 50_000
	}
	sized(b, services, 2, func(b *testing.B, c *cluster) {
		ns := netnstest.New(b)
		writer := startOtherWriter(b, ns, time.Millisecond)
		defer writer.end(b)
		p := startProvider(b, c, ns)
		defer func() { p.stop() }()
		phase := func(name string, change func()) {
			b.Run(name, func(b *testing.B) {
				writer.waits(b)
				start := time.Now()
				change()
				b.ReportMetric(float64(time.Since(start))/float64(time.Millisecond), "ms")
				writer.report(b)
				start = time.Now()
				p.OnEndpointSliceUpdate(nil, newSlice(c.slices[0].ObjectMeta, 5_000_000+10*len(name), 2))
				p.sync(b)
				b.ReportMetric(float64(time.Since(start))/float64(time.Millisecond), "next-ms")
				for _, took := range p.takeLatencies() {
					b.ReportMetric(float64(took)/float64(time.Millisecond), "beside-ms")
				}
				b.ReportMetric(0, "ns/op")
			})
		}
		b.Run("alone", func(b *testing.B) {
			writer.waits(b)
			time.Sleep(500 * time.Millisecond)
			writer.report(b)
			b.ReportMetric(0, "ns/op")
		})
		other := newCluster(1, 2).services[0].DeepCopy()
		other.Namespace, other.Spec.ClusterIP = "other", "10.255.0.1"
		phase("come", func() {
			p.OnServiceAdd(other)
			p.load(b)
		})
		phase("change", func() {
			for i, slice := range c.slices {
				p.Tracker().Endpoints.EndpointSliceUpdate(newSlice(slice.ObjectMeta, 3_000_000+2*i, 2), false)
			}
			before := p.syncs.Load()
			p.Trigger()
			poll.Until(b, "the first part", func() bool { return p.syncs.Load() > before })
			p.mu.Lock()
			p.underWay = append(p.underWay, time.Now())
			p.mu.Unlock()
			p.OnEndpointSliceUpdate(nil, newSlice(other.ObjectMeta, 4_000_000, 2))
			p.sync(b)
		})
		phase("full", func() {
			p.Tracker().SetNode(changetracker.Node{Name: "bench", Zone: strconv.Itoa(1)})
			p.sync(b)
		})
		phase("repair", func() { p.measureRepair(b, 1) })
		phase("restart", func() {
			p.stop()
			p = startProvider(b, c, ns)
			p.load(b)
		})
		phase("go", func() {
			for i := range c.services {
				p.Tracker().Services.Update(c.services[i], nil)
				p.Tracker().Endpoints.EndpointSliceUpdate(c.slices[i], true)
			}
			p.sync(b)
		})
	})
}

// takeLatencies returns how long each event took that was under way until the end of the first sync that began after it.
func (p *programmed) takeLatencies() (took []time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	took, p.latencies = p.latencies, nil
	return took
}

func (w *otherWriter) report(b *testing.B) {
	b.Helper()
	took := w.waits(b)
	for name, d := range map[string]time.Duration{"p50-ms": took.p50, "p99-ms": took.p99, "longest-ms": took.longest} {
		b.ReportMetric(float64(d)/float64(time.Millisecond), name)
	}
}
