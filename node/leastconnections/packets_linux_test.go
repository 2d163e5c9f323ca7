package leastconnections_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/leastconnections"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// world is a network with a Provider of nftables and a Balancer on its node.
type world struct {
	*proxiertest.Topology
	t        *testing.T
	provider *proxier.Proxier
	balancer *leastconnections.Balancer
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Topology: proxiertest.NewTopology(t), t: t}
	config := w.Config()
	config.Runner = runner.Options{MinInterval: runner.Unlimited}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.Balancing = changetracker.LeastConnections }
	var err error
	w.provider, err = nftables.New(nftables.Config{Config: config}, proxier.Deps{})
	netnstest.Check(t, err)
	w.provider.OnServiceSynced()
	w.provider.OnEndpointSlicesSynced()
	w.balancer, err = leastconnections.New(leastconnections.Options{
		List: conntrack.OpenConnections(config.NetNS), Pause: 50 * time.Millisecond, Logger: zaptest.NewLogger(t),
	})
	netnstest.Check(t, err)
	poll.Background(t, w.provider.Run)
	poll.Background(t, func(ctx context.Context) error { return w.balancer.Run(ctx, w.provider) })
	return w
}

// endpoints gives a Service endpoints.
func (w *world) endpoints(service string, family v1.IPFamily, protocol v1.Protocol, pods ...*proxiertest.Host) {
	w.t.Helper()
	parts := []proxiertest.SliceOption{proxiertest.SliceName(service), proxiertest.SlicePort("p", protocol, 8080)}
	for _, pod := range pods {
		parts = append(parts, proxiertest.Endpoint(pod.Addr(family).String()))
	}
	slice := proxiertest.Slice("default", service, discovery.AddressType(family), parts...)
	w.provider.OnEndpointSliceUpdate(nil, slice)
	netnstest.Check(w.t, proxiertest.Sync(w.t.Context(), w.provider))
}

// open opens connections, and returns how many each server has.
func (w *world) open(n int, network string, vip netip.AddrPort) map[string]int {
	w.t.Helper()
	servers := map[string]int{}
	for range n {
		conn, err := w.Client.Open(w.t.Context(), network, vip, proxiertest.AskOptions{})
		netnstest.Check(w.t, err)
		w.t.Cleanup(func() { _ = conn.Close() })
		answer, err := conn.Ask(w.t.Context())
		netnstest.Check(w.t, err)
		servers[answer.Server]++
	}
	return servers
}

// LCB-01: an endpoint that comes to two that have connections gets nearly all new ones. Connections without a Service do
// not count.
func TestConnectionsGoWhereFewAreOpen(t *testing.T) {
	w := newWorld(t)
	for i, c := range []struct {
		family   v1.IPFamily
		network  string
		protocol v1.Protocol
		vip      string
	}{
		{v1.IPv4Protocol, "tcp", v1.ProtocolTCP, "10.96.0.10:80"},
		{v1.IPv6Protocol, "tcp", v1.ProtocolTCP, "[fd00:10:96::10]:80"},
		{v1.IPv4Protocol, "udp", v1.ProtocolUDP, "10.96.0.11:80"},
		{v1.IPv6Protocol, "udp", v1.ProtocolUDP, "[fd00:10:96::11]:80"},
	} {
		t.Run(c.network+string(c.family), func(t *testing.T) {
			vip := netip.MustParseAddrPort(c.vip)
			service, name := string(rune('a'+i)), changetracker.ServicePortName{}
			w.provider.OnServiceAdd(proxiertest.Service("default", service, proxiertest.ClusterIPs(vip.Addr().String()), proxiertest.Port("p", c.protocol, 80)))
			name.Namespace, name.Name, name.Port, name.Protocol = "default", service, "p", c.protocol
			pods := w.RemotePods
			w.endpoints(service, c.family, c.protocol, pods[0], pods[1])
			w.open(120, c.network, vip)
			w.open(120, c.network, netip.AddrPortFrom(pods[2].Addr(c.family), 8080)) // these do not count
			w.endpoints(service, c.family, c.protocol, pods[0], pods[1], pods[2])
			prefers := func() bool {
				for _, e := range w.provider.Programmed(c.family).Endpoints(name) {
					if isNew := e.Addr.Addr() == pods[2].Addr(c.family); isNew != (e.Weight == 16) || !isNew && e.Weight > 2 {
						return false
					}
				}
				return true
			}
			poll.Until(t, "the new endpoint has the greatest weight", prefers)
			if got := w.open(30, c.network, vip); got["remote-2"] < 15 { // less comes once in 30,000 times
				t.Errorf("30 connections went to %v: want most at remote-2", got)
			}
		})
	}
}

// A TCP connection counts until it is closed.
func TestClosedConnectionsDoNotCount(t *testing.T) {
	w := newWorld(t)
	vip := netip.MustParseAddrPort("10.96.0.10:80")
	w.provider.OnServiceAdd(proxiertest.Service("default", "a", proxiertest.ClusterIPs(vip.Addr().String()), proxiertest.Port("p", v1.ProtocolTCP, 80)))
	w.endpoints("a", v1.IPv4Protocol, v1.ProtocolTCP, w.RemotePods[0])
	t.Run("open", func(t *testing.T) {
		here := *w
		here.t = t
		here.open(10, "tcp", vip)
		poll.Until(t, "ten connections count", func() bool { return w.balancer.Readings().Connections == 10 })
	})
	poll.Until(t, "none counts", func() bool { return w.balancer.Readings().Connections == 0 })
}
