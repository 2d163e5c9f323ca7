package conntrack_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

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
)

// countTraffic counts in a namespace until the returned function is called.
func countTraffic(ctx context.Context, tb testing.TB, netNS string, log *zap.Logger) (c *conntrack.Cleaner, stop func()) {
	tb.Helper()
	c = conntrack.New(conntrack.Options{NetNS: netNS})
	ctx, cancel := context.WithCancel(ctx)
	begun, ended := make(chan struct{}, 2), make(chan error, 1)
	go func() { ended <- c.RunTraffic(ctx, log, func() { begun <- struct{}{} }) }()
	<-begun
	return c, func() {
		cancel()
		if err := <-ended; err != nil {
			tb.Errorf("RunTraffic: %v", err)
		}
	}
}

// TestTrafficIsNotCountedWithoutTheKernel: Counts says why, and the log says so once.
func TestTrafficIsNotCountedWithoutTheKernel(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zap.InfoLevel)
	c, stop := countTraffic(t.Context(), t, "/no/such/namespace", zap.New(core))
	poll.Until(t, "the failure is told", func() bool {
		counts, err := c.AddTraffic(t.Context(), v1.IPv4Protocol, proxier.Counts{})
		return err == nil && !counts.Traffic && counts.TrafficProblem != "" && logs.Len() == 1
	})
	stop()
}

// BenchmarkTraffic reads the traffic of 100,000 open connections, and of as many when they end.
func BenchmarkTraffic(b *testing.B) {
	const flows = 100_000
	b.Run(fmt.Sprintf("flows=%d", flows), func(b *testing.B) {
		tab := newTable(b)
		netnstest.Check(b, tab.ns.SetSysctl("net/netfilter/nf_conntrack_acct", "1"))
		c, stop := countTraffic(b.Context(), b, tab.ns.Path(), zap.NewNop())
		defer stop()
		s := &desired.Service{
			Name: changetracker.ServicePortName{Port: "dns"}, Protocol: desired.UDP, Cluster: []netip.AddrPort{at("10.244.0.1:53")},
			Frontends: []desired.Frontend{{Kind: desired.ClusterIP, VIP: netip.MustParseAddr("10.96.0.1"), Port: 53}},
		}
		c.FollowTraffic(&desired.Update{Family: v1.IPv4Protocol, Full: true, Changes: desired.ChangesTo(s)}, desired.FlowCheck{}, func(*desired.Service) bool { return true })
		for i := range flows {
			client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 16), byte(i >> 8)}), 1024+uint16(i%256))
			tab.add(entry{unix.IPPROTO_UDP, client, at("10.96.0.1:53"), at("10.244.0.1:53"), 0})
		}
		start := time.Now()
		for range b.N {
			if _, err := c.AddTraffic(b.Context(), v1.IPv4Protocol, proxier.Counts{}); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(time.Since(start).Microseconds())/1000/float64(b.N), "ms/reading")
		b.ReportMetric(0, "ns/op")
	})
}
