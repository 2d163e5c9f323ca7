package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
)

// BenchmarkTargets measures syncs of one engine with a kernel in memory: the time of the
// engine alone. Each figure has the number of messages to the kernel.
func BenchmarkTargets(b *testing.B) {
	const endpoints = 10
	for _, n := range []int{1000, 5000} {
		services := benchServices(n, endpoints)
		b.Run(fmt.Sprintf("fake/N=%d/E=%d", n, endpoints), func(b *testing.B) {
			b.Run("first", func(b *testing.B) { benchFirst(b, services) })
			n := newFakeNode()
			e := n.engine(b)
			mustApply(b, e, full(services...))
			b.Run("restart", func(b *testing.B) {
				benchUpdates(b, n, func(int) { mustApply(b, n.engine(b), full(services...)) })
			})
			b.Run("full", func(b *testing.B) {
				benchUpdates(b, n, func(int) { mustApply(b, e, full(services...)) })
			})
			for _, count := range []int{1, 100} {
				b.Run(fmt.Sprintf("replaced=%d", count), func(b *testing.B) {
					there, back := benchReplaced(services, count)
					updates := []desired.Update{partial(there...), partial(back...)}
					mustApply(b, e, updates[0]) // now each endpoint exists, and drains
					mustApply(b, e, updates[1])
					benchUpdates(b, n, func(i int) { mustApply(b, e, updates[i%2]) })
				})
			}
		})
	}
}

// benchUpdates reports the messages of each update, with its time and memory.
func benchUpdates(b *testing.B, n *node, update func(i int)) {
	b.Helper()
	b.ReportAllocs()
	before, runs := n.messages(), 0
	for b.Loop() {
		update(runs)
		runs++
	}
	b.ReportMetric(float64(n.messages()-before)/float64(runs), "messages")
}

func benchFirst(b *testing.B, services []*desired.Service) {
	b.ReportAllocs()
	var n *node
	for b.Loop() {
		b.StopTimer()
		n = newFakeNode()
		e := n.engine(b)
		b.StartTimer()
		mustApply(b, e, full(services...))
	}
	b.ReportMetric(float64(n.messages()), "messages")
}

// messages are those to IPVS and to the device.
func (n *node) messages() int { return n.kernel.calls + n.device.calls }

// benchServices are ClusterIP Services with one TCP port.
func benchServices(n, endpoints int) []*desired.Service {
	all := make([]*desired.Service, n)
	for i := range all {
		all[i] = service(clusterName(i), clusterVIP(i))
		for j := i * endpoints; j < (i+1)*endpoints; j++ {
			at := netip.AddrFrom4([4]byte{11, byte(j >> 16), byte(j >> 8), byte(j)})
			all[i].Cluster = all[i].Cluster.With(netip.AddrPortFrom(at, 8080))
		}
		all[i].Serving = all[i].Cluster
		all[i].Frontends[0].Action = desired.Forward
	}
	return all
}

// benchReplaced returns some Services with their last endpoint replaced, and the originals.
func benchReplaced(services []*desired.Service, count int) (there, back []*desired.Service) {
	for i := range count {
		s := services[i*37%len(services)]
		other := *s
		addrs := slices.Clone(s.Cluster.Slice())
		addrs[len(addrs)-1] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{99, 0, byte(i >> 8), byte(i)}), 8080)
		other.Cluster = desired.EndpointsOf(addrs...)
		other.Serving = other.Cluster
		there, back = append(there, &other), append(back, s)
	}
	return there, back
}
