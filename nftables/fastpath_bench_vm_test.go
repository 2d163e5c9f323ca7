//go:build vm

package nftables_test

import (
	"net"
	"net/netip"
	"os/exec"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// BenchmarkFastPath measures the CPU time of a datagram that the node forwards to an endpoint, from the
// client's socket until the endpoint's host drops it: without and with the fast path in turn.
func BenchmarkFastPath(b *testing.B) {
	const datagrams, runs, requests = 2_000, 15, 20
	world := proxiertest.NewTopology(b)
	p, err := nftables.New(hurried(world.Config()), proxier.Deps{})
	netnstest.Check(b, err)
	pod := world.LocalPods[0]
	vips := [2]string{"10.96.0.1", "10.96.0.2"}
	for i, name := range [2]string{"slow", "fast"} {
		s := proxiertest.Service("default", name, proxiertest.ClusterIPs(vips[i]), proxiertest.Port("udp", v1.ProtocolUDP, 80))
		if i == 0 {
			s.Annotations = map[string]string{slow: "yes"}
		}
		p.OnServiceAdd(s)
		p.OnEndpointSliceAdd(proxiertest.Slice("default", name, discovery.AddressTypeIPv4,
			proxiertest.SlicePort("udp", v1.ProtocolUDP, 8080), proxiertest.Endpoint(pod.Addr(v1.IPv4Protocol).String())))
	}
	proxiertest.Run(b, p)
	netnstest.Check(b, proxiertest.Sync(b.Context(), p))
	var flows [2]*net.UDPConn
	for i, vip := range vips {
		netnstest.Check(b, world.Client.Do(func() (err error) {
			flows[i], err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(vip+":80")))
			return err
		}))
		b.Cleanup(func() { _ = flows[i].Close() })
		for range requests { // the flow is established
			netnstest.Check(b, send(flows[i], 1))
			if _, err := flows[i].Read(make([]byte, 1500)); err != nil {
				b.Fatal(err)
			}
		}
	}
	netnstest.Check(b, pod.Do(func() error {
		return exec.CommandContext(b.Context(), "nft", "add table inet sink; add chain inet sink in { type filter hook prerouting priority -300; policy drop; }").Run()
	}))
	compareSending(b, datagrams, runs, flows, "slow-cpu-ns/packet")
}
