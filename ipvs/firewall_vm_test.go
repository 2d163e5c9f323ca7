//go:build vm

package ipvs_test

import (
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// TestHealthChecksPassAFirewall: with policy DROP at INPUT, load balancers get a response from
// the health check node port, at the node's address and at a VIP, while the Service has one.
// Other ports stay closed.
func TestHealthChecksPassAFirewall(t *testing.T) {
	for _, variant := range []iptables.Variant{iptables.VariantNFT, iptables.VariantLegacy} {
		t.Run(string(variant), func(t *testing.T) { testFirewall(t, variant) })
	}
}

func testFirewall(t *testing.T, variant iptables.Variant) {
	const health, other = 31999, 31998
	node, away := netnstest.New(t), netnstest.New(t)
	netnstest.Connect(t, node, []string{"192.0.2.1/24", "2001:db8::1/64"}, away, []string{"192.0.2.2/24", "2001:db8::2/64"})
	netnstest.Serve(t, node, "health", health, other)
	vips := []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8:1::1")}
	netnstest.Check(t, away.AddRoute(netip.PrefixFrom(vips[0], 32), netip.MustParseAddr("192.0.2.1")))
	netnstest.Check(t, away.AddRoute(netip.PrefixFrom(vips[1], 128), netip.MustParseAddr("2001:db8::1")))
	netnstest.Run(t, node, "ip6tables-"+string(variant), "-A", "INPUT", "-p", "ipv6-icmp", "-j", "ACCEPT") // neighbour discovery
	netnstest.Run(t, node, "iptables-"+string(variant), "-P", "INPUT", "DROP")
	netnstest.Run(t, node, "ip6tables-"+string(variant), "-P", "INPUT", "DROP")

	config := proxier.Config{NetNS: node.Path(), Runner: runner.Options{MinInterval: runner.Unlimited}}
	p, err := ipvs.New(ipvs.Config{Config: config, SetSysctls: true, Firewall: func(family v1.IPFamily) (proxier.Engine, error) {
		return iptables.NewEngine(iptables.Config{Config: config, Variant: variant, HealthChecksOnly: true}, family, proxier.Deps{})
	}}, proxier.Deps{Health: proxier.NoHealth()})
	if err != nil {
		t.Fatal(err)
	}
	service := func(port int32) *v1.Service {
		return proxiertest.Service("test", "web", proxiertest.ClusterIPs("10.96.0.1", "fd00:10:96::1"), proxiertest.NodePort("main", v1.ProtocolTCP, 80, 30080),
			proxiertest.LoadBalancer(vips[0].String()), proxiertest.LoadBalancer(vips[1].String()), proxiertest.ExternalPolicyLocal(),
			func(s *v1.Service) { s.Spec.HealthCheckNodePort = port })
	}
	p.OnServiceAdd(service(health))
	p.OnEndpointSliceAdd(proxiertest.Slice("test", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("main", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.1.2")))
	proxiertest.Run(t, p)
	check := func(what string, port uint16, want bool) {
		t.Helper()
		if err := proxiertest.Sync(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		for _, addr := range append(vips, netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")) {
			timeout := 20 * time.Second
			if !want {
				timeout = 500 * time.Millisecond
			}
			_, err := netns.Ask(t.Context(), away, "tcp", netip.AddrPortFrom(addr, port), netns.AskOptions{Timeout: timeout})
			if (err == nil) != want {
				t.Errorf("%s: %v port %d: %v, want an answer: %v", what, addr, port, err, want)
			}
		}
	}
	check("with a health check node port", health, true)
	check("another port", other, false)
	netnstest.Run(t, node, "iptables-"+string(variant), "-F", "INPUT") // another program
	netnstest.Run(t, node, "ip6tables-"+string(variant), "-F", "INPUT")
	netnstest.Run(t, node, "ip6tables-"+string(variant), "-A", "INPUT", "-p", "ipv6-icmp", "-j", "ACCEPT")
	for _, addr := range vips { // the client repeats its SYN until the repair
		if _, err := netns.Ask(t.Context(), away, "tcp", netip.AddrPortFrom(addr, health), netns.AskOptions{Timeout: 20 * time.Second}); err != nil {
			t.Errorf("after a flush: %v port %d: %v, want an answer", addr, health, err)
		}
	}
	p.OnServiceUpdate(nil, service(0))
	check("without a health check node port", health, false)
	p.OnServiceUpdate(nil, service(health))
	check("with one again", health, true)
	p.OnServiceDelete(service(health))
	check("without the Service", health, false)
}
