package conntrack_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// countTraffic counts in a namespace until the returned function is called.
func countTraffic(tb testing.TB, netNS string, log *zap.Logger) (c *proxier.Conntrack, stop func()) {
	tb.Helper()
	c = conntrack.New(conntrack.Options{NetNS: netNS})
	begun := make(chan struct{}, 2)
	stop = poll.Background(tb, func(ctx context.Context) error { return c.RunTraffic(ctx, log, func() { begun <- struct{}{} }) })
	<-begun
	return c, stop
}

// TestTrafficIsNotCountedWithoutTheKernel: Counts says why, and the log says so once.
func TestTrafficIsNotCountedWithoutTheKernel(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zap.InfoLevel)
	c, stop := countTraffic(t, "/no/such/namespace", zap.New(core))
	poll.Until(t, "the failure is told", func() bool {
		counts, err := c.AddTraffic(t.Context(), v1.IPv4Protocol, connection.Counts{})
		return err == nil && !counts.Traffic && counts.TrafficProblem != "" && logs.Len() == 1
	})
	stop()
}

// BenchmarkTraffic reads the traffic of 100,000 open connections, and measures the CPU time of connections
// that end, without a proxy that counts, and with it in turn. Most of it is the kernel's.
func BenchmarkTraffic(b *testing.B) {
	const flows, ends = 100_000, 4000
	fill := func(tab *table, n int) {
		for i := range n {
			client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 16), byte(i >> 8)}), 1024+uint16(i%256))
			tab.add(entry{unix.IPPROTO_UDP, client, at("10.96.0.1:53"), at("10.244.0.1:53"), 0})
		}
	}
	begin := func(b *testing.B) (tab *table, read func() connection.Counts) {
		b.Helper()
		tab = newTable(b)
		netnstest.Check(b, tab.ns.SetSysctl("net/netfilter/nf_conntrack_acct", "1"))
		c, stop := countTraffic(b, tab.ns.Path(), zap.NewNop())
		b.Cleanup(stop)
		s := &desired.Service{
			Name: changetracker.ServicePortName{Port: "dns"}, Protocol: desired.UDP, Cluster: desired.EndpointsOf(at("10.244.0.1:53")),
			Frontends: []desired.Frontend{{Kind: desired.ClusterIP, VIP: netip.MustParseAddr("10.96.0.1"), Port: 53}},
		}
		c.FollowTraffic(v1.IPv4Protocol, []desired.Applied{{Name: s.Name, Is: s}}, desired.FlowCheck{}, func(*desired.Service) bool { return true })
		return tab, func() connection.Counts {
			counts, err := c.AddTraffic(b.Context(), v1.IPv4Protocol, connection.Counts{})
			netnstest.Check(b, err)
			return counts
		}
	}
	b.Run(fmt.Sprintf("flows=%d", flows), func(b *testing.B) {
		tab, read := begin(b)
		fill(tab, flows)
		before := cpuTime()
		for range b.N {
			read()
		}
		b.ReportMetric(float64((cpuTime()-before).Microseconds())/1000/float64(b.N), "cpu-ms/reading")
		b.ReportMetric(0, "ns/op")
	})
	b.Run("ends", func(b *testing.B) {
		var tables [2]*table
		tables[0] = newTable(b)
		counting, read := begin(b)
		tables[1] = counting
		var cpu [2]time.Duration
		for range b.N {
			for on, tab := range tables {
				fill(tab, ends)
				before := cpuTime()
				netnstest.Check(b, tab.h.ConntrackTableFlush(netlink.ConntrackTable))
				if on == 1 {
					if lost := read().TrafficLosses; lost != 0 {
						b.Errorf("%d losses of notifications", lost)
					}
				}
				cpu[on] += cpuTime() - before
			}
		}
		for on, name := range []string{"off-cpu-ns/end", "cpu-ns/end"} {
			b.ReportMetric(float64(cpu[on])/float64(b.N*ends), name)
		}
		b.ReportMetric(0, "ns/op")
	})
}

func cpuTime() time.Duration {
	var used unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &used) // fails only if its arguments are wrong
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
