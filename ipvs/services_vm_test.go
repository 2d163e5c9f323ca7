//go:build vm

package ipvs_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
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

// TestADatagramAfterItsServerWentIsLost: IPVS drops the next datagram of a flow whose real server is
// gone, and its sender on the node gets EPERM. The flow gets another endpoint with the datagram after
// that. A moment later the kernel would have forgotten the flow by itself, and no datagram would be
// lost: a setting of the kernel keeps it here, so that the test has that moment. This test fails when
// a kernel can do better: docs/ENGINES.md says it.
func TestADatagramAfterItsServerWentIsLost(t *testing.T) {
	n := newNode(t)
	n.proxy.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs(webVIP), proxiertest.Port("dns", v1.ProtocolUDP, 53)))
	slice := proxiertest.Slice("shop", "web", "IPv4", proxiertest.SlicePort("dns", v1.ProtocolUDP, 8080))
	pods := n.world.LocalPods[:2]
	for _, pod := range pods {
		proxiertest.Endpoint(pod.Addr(v1.IPv4Protocol).String(), proxiertest.OnNode("node"))(slice)
	}
	n.proxy.OnEndpointSliceAdd(slice)
	n.synced()
	flow, err := n.world.Node.Open(t.Context(), "udp", netip.MustParseAddrPort(webVIP+":53"), proxiertest.AskOptions{Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = flow.Close() }()
	before, err := flow.Ask(t.Context())
	if err != nil {
		t.Fatalf("with two endpoints: %v, want an answer", err)
	}
	gone, stays := pods[0], pods[1]
	if before.Server == stays.Name {
		gone, stays = stays, gone
	}
	n.run("sysctl", "-w", "net.ipv4.vs.expire_nodest_conn=0")
	n.run("ipvsadm", "-d", "-u", webVIP+":53", "-r", gone.Addr(v1.IPv4Protocol).String()+":8080")
	n.run("sysctl", "-w", "net.ipv4.vs.expire_nodest_conn=1")
	if _, err := flow.Ask(t.Context()); !errors.Is(err, proxiertest.ErrDroppedLocally) {
		t.Errorf("the first datagram without its real server: %v, want %v as of IPVS so far", err, proxiertest.ErrDroppedLocally)
	}
	for range 3 {
		if after, err := flow.Ask(t.Context()); err != nil || after.Server != stays.Name {
			t.Errorf("the datagrams after that are answered by %q, %v, want %s", after.Server, err, stays.Name)
		}
	}
}

// TestTwoVIPsFromOneSourcePort: IPVS finds the connection of an answer by the addresses of the
// endpoint and of the client. If a client has two connections from one port to two VIPs, and both
// lead to the same endpoint, answers of the first one come from the VIP of the second one, and the
// client ignores them. This test fails when a kernel can do better: docs/ENGINES.md says it.
func TestTwoVIPsFromOneSourcePort(t *testing.T) {
	const other = "198.51.100.77"
	n := newNode(t)
	service := web()
	service.Spec.ExternalIPs = []string{other}
	n.proxy.OnServiceAdd(service)
	n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0]))
	n.synced()
	host := n.world.LocalPods[2]
	options := proxiertest.AskOptions{From: host.Addr(v1.IPv4Protocol), FromPort: 23456, Timeout: 2 * time.Second}
	first, err := host.Open(t.Context(), "tcp", netip.MustParseAddrPort(webVIP+":80"), options)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.Close() }()
	if _, err := first.Ask(t.Context()); err != nil {
		t.Fatalf("the first connection alone: %v, want an answer", err)
	}
	second, err := host.Open(t.Context(), "tcp", netip.MustParseAddrPort(other+":80"), options)
	if err != nil {
		t.Fatalf("the second connection: %v, want it to open", err)
	}
	defer func() { _ = second.Close() }()
	if _, err := second.Ask(t.Context()); err != nil {
		t.Errorf("the second connection: %v, want an answer", err)
	}
	if _, err := first.Ask(t.Context()); !errors.Is(err, proxiertest.ErrTimeout) {
		t.Errorf("the first connection beside the second one: %v, want %v as of IPVS so far", err, proxiertest.ErrTimeout)
	}
}

// A changed policy refuses no connection, although the kernel has no scheduler for a moment. Open connections stay.
func TestAChangedPolicyRefusesNoConnection(t *testing.T) {
	const annotation, dialers = "example.com/policy", 4
	n := newNode(t, func(c *ipvs.Config) {
		c.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
			_ = p.Balancing.UnmarshalText([]byte(s.Annotations[annotation])) // random without it
		}
	})
	before := web()
	n.proxy.OnServiceAdd(before)
	n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0], n.world.LocalPods[1]))
	n.synced()
	from, to := n.world.LocalPods[2], netip.MustParseAddrPort(webVIP+":80")
	patient := proxiertest.AskOptions{Timeout: 30 * time.Second} // what is dropped is sent again
	flow, err := from.Open(t.Context(), "tcp", to, patient)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = flow.Close() }()
	var (
		all   sync.WaitGroup
		ended atomic.Bool
		asked atomic.Int32
	)
	for range dialers {
		all.Go(func() {
			for !ended.Load() {
				if _, err := from.Ask(t.Context(), "tcp", to, patient); err != nil {
					t.Errorf("after %d connections: %v, want an answer", asked.Load(), err)
				}
				asked.Add(1)
			}
		})
	}
	for _, step := range []struct{ policy, scheduler string }{
		{"source-hash", "mh (mh-fallback)"},
		{"source-port-hash", "mh (mh-fallback,mh-port)"},
		{"least-connections", "lc"},
		{"random", "rr"},
		{"source-hash", "mh (mh-fallback)"},
		{"random", "rr"},
	} {
		more := asked.Load() + dialers
		poll.Until(t, "connections are made between changes", func() bool { return asked.Load() >= more })
		after := web()
		after.Annotations = map[string]string{annotation: step.policy}
		n.proxy.OnServiceUpdate(before, after)
		n.sync()
		before = after
		if got, want := n.run("ipvsadm", "-Ln"), fmt.Sprintf("TCP  %s:80 %s", webVIP, step.scheduler); !strings.Contains(got, want) {
			t.Errorf("policy %s: ipvsadm lists\n%swant %s", step.policy, got, want)
		}
		if _, err := flow.Ask(t.Context()); err != nil {
			t.Errorf("policy %s: the open connection: %v, want an answer", step.policy, err)
		}
	}
	ended.Store(true)
	all.Wait()
	t.Logf("%d connections", asked.Load())
}
