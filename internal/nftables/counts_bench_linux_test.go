package nftables

import (
	"context"
	"encoding/binary"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/runner"
)

// BenchmarkCounts measures what counting connections costs: the CPU time of a first sync and of the
// first packet of a connection, with and without counters in turn, and a reading.
func BenchmarkCounts(b *testing.B) {
	services, runs, connections := 500, 2, 1000
	if os.Getenv(benchFull) == "1" {
		services, runs, connections = 10_000, 7, 5000
	}
	sized(b, services, 10, func(b *testing.B, c *cluster) {
		b.Run("first", func(b *testing.B) {
			var cpus [2][]time.Duration
			for range runs {
				for on := range 2 {
					p := newBenchCounting(b, c, on == 1)
					before := cpuTime()
					p.load(b)
					cpus[on] = append(cpus[on], cpuTime()-before)
					p.stop()
					netnstest.Check(b, p.ns.Close())
				}
			}
			reportCounting(b, cpus)
		})
	})
	sized(b, services/10, 10, func(b *testing.B, c *cluster) {
		var nodes [2]*programmed
		for on := range nodes {
			nodes[on] = newBenchCounting(b, c, on == 1)
			nodes[on].load(b)
			defer nodes[on].stop()
		}
		b.Run("connections", func(b *testing.B) {
			var cpus [2][]time.Duration
			for run := range 3 * runs {
				for on, p := range nodes {
					cpus[on] = append(cpus[on], p.flood(b, run*connections, connections)/time.Duration(connections))
				}
			}
			reportCounting(b, cpus)
		})
		b.Run("reading", func(b *testing.B) {
			var last connection.Counts
			f := measure(runs, func() {}, func() { last = readCounts(b, nodes[1].engine) })
			all, counters := uint64(0), 0
			for _, p := range last.ServicePorts {
				all, counters = all+p.Connections, counters+len(p.Endpoints)
			}
			if want := uint64(3 * runs * connections); all != want {
				b.Errorf("%d connections counted, want %d", all, want)
			}
			f.report(b)
			b.ReportMetric(float64(counters), "counters")
		})
	})
}

func readCounts(b *testing.B, e *Engine) connection.Counts {
	counts, err := e.Counts(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	return counts
}

// newBenchCounting returns a Provider in a namespace from which endpoints are reached.
func newBenchCounting(b *testing.B, c *cluster, on bool) *programmed {
	b.Helper()
	node, err := netns.New()
	netnstest.Check(b, err)
	peer := netnstest.New(b)
	netnstest.Connect(b, node, []string{"192.0.2.1/24"}, peer, []string{"192.0.2.2/24"})
	netnstest.Check(b, node.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("192.0.2.2")))
	return startConfigured(b, c, node, proxier.Config{CountConnections: on, Runner: runner.Options{MinInterval: runner.Unlimited}})
}

// reportCounting reports the times without and with counters, and their ratio.
func reportCounting(b *testing.B, cpus [2][]time.Duration) {
	off, on := median(cpus[0]), median(cpus[1])
	b.ReportMetric(float64(off)/float64(time.Millisecond), "off-cpu-ms")
	b.ReportMetric(float64(on)/float64(time.Millisecond), "cpu-ms")
	b.ReportMetric(float64(on)/float64(off), "ratio")
	b.ReportMetric(0, "ns/op")
}

// flood sends the first packets of n connections, from the node to one Service after the other,
// and returns the CPU time. No two have the same source: first numbers them.
func (p *programmed) flood(b *testing.B, first, n int) (cpu time.Duration) {
	b.Helper()
	err := p.ns.Do(func() error {
		raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(raw) }()
		before := cpuTime()
		for i := first; i < first+n; i++ {
			vip := netip.MustParseAddr(p.cluster.services[i%len(p.cluster.services)].Spec.ClusterIP).As4()
			if err := unix.Sendto(raw, syn(vip, uint32(i/len(p.cluster.services))), 0, &unix.SockaddrInet4{Addr: vip}); err != nil {
				return err
			}
		}
		cpu = cpuTime() - before
		return context.Cause(b.Context())
	})
	netnstest.Check(b, err)
	return cpu
}

// syn is a TCP SYN to port 80 without checksums, which nobody checks on the way.
func syn(to [4]byte, number uint32) []byte {
	const headerLen = 20 // of both protocols
	p := make([]byte, 2*headerLen)
	p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_TCP
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
	copy(p[12:], []byte{192, 0, 2, 1})
	copy(p[16:], to[:])
	tcp := p[headerLen:]
	binary.BigEndian.PutUint16(tcp, uint16(1024+number))
	binary.BigEndian.PutUint16(tcp[2:], 80)
	binary.BigEndian.PutUint32(tcp[4:], number)
	tcp[12], tcp[13] = headerLen/4<<4, 2 // SYN
	binary.BigEndian.PutUint16(tcp[14:], 65535)
	return p
}
