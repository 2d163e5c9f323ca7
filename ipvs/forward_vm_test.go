//go:build vm

package ipvs

import (
	"fmt"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/hybrid"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// triangle is a client, a node and a server, each connected with both others. The client's way to VIPs is
// the node, and the server's way to the client is their own cable. So what the server answers itself
// does not pass the node.
type triangle struct {
	bare

	client, server *netns.NS
}

func newTriangle(t *testing.T) *triangle {
	t.Helper()
	client, node, server := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	at := func(cable, host int) []netip.Prefix {
		return []netip.Prefix{
			netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/30", 4*cable+host)), netip.MustParsePrefix(fmt.Sprintf("2001:db8:f%d::%d/64", cable, host)),
		}
	}
	netnstest.Check(t, netns.Connect(netns.Plug{NS: client, Link: "node", Addrs: at(1, 1)}, netns.Plug{NS: node, Link: "client", Addrs: at(1, 2)}))
	netnstest.Check(t, netns.Connect(netns.Plug{NS: node, Link: "server", Addrs: at(2, 1)}, netns.Plug{NS: server, Link: "node", Addrs: at(2, 2)}))
	netnstest.Check(t, netns.Connect(netns.Plug{NS: server, Link: "client", Addrs: at(3, 1)}, netns.Plug{NS: client, Link: "server", Addrs: at(3, 2)}))
	netnstest.Check(t, node.Forward())
	w := &triangle{bare{t, node.Path()}, client, server}
	for _, all := range []string{"0.0.0.0/0", "::/0"} {
		six := all == "::/0"
		gateway := map[bool][2]string{false: {"192.0.2.6", "192.0.2.14"}, true: {"2001:db8:f1::2", "2001:db8:f3::2"}}[six]
		netnstest.Check(t, client.AddRoute(netip.MustParsePrefix(all), netip.MustParseAddr(gateway[0])))
		netnstest.Check(t, server.AddRoute(netip.MustParsePrefix(all), netip.MustParseAddr(gateway[1])))
	}
	for _, ns := range []*netns.NS{client, node, server} { // ways there and back differ
		for _, link := range []string{"all", "default", "client", "node", "server"} {
			_ = ns.SetSysctl("net/ipv4/conf/"+link+"/rp_filter", "0") // each has two of the links
		}
	}
	return w
}

func (w *triangle) inServer(args ...string) {
	w.t.Helper()
	bare{w.t, w.server.Path()}.run(args[0], args[1:]...)
}

// TestForwardingMethods: with direct forwarding and with a tunnel, the server gets the client's packets with the VIP as
// destination and the client as source, and answers it without the node; the node port is masqueraded, and so are other
// service ports. A change of the method takes new connections to it at once, and keeps the open one.
func TestForwardingMethods(t *testing.T) {
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		t.Run(string(family), func(t *testing.T) {
			w := newTriangle(t)
			netnstest.Serve(t, w.server, "server", 80)
			vip, real, client := ofFamily(family, webVIP, webVIP6), ofFamily(family, "192.0.2.10:80", "[2001:db8:f2::2]:80"), ofFamily(family, "192.0.2.5", "2001:db8:f1::1")
			own := netip.MustParseAddr(vip)
			netnstest.Check(t, w.server.AddAddrs("lo", netip.PrefixFrom(own, own.BitLen())))
			if family == v1.IPv4Protocol {
				w.inServer("modprobe", "ipip")
				w.inServer("ip", "link", "set", "tunl0", "up")
				_ = w.server.SetSysctl("net/ipv4/conf/tunl0/rp_filter", "0")
			} else {
				w.inServer("modprobe", "ip6_tunnel")
				w.inServer("ip", "link", "set", "ip6tnl0", "up")
			}
			now := ForwardMasquerade
			config := Config{Config: proxier.Config{NetNS: w.ns, Names: proxier.DefaultNames()}, SetSysctls: true, Tune: func(*desired.Service) Tuning { return Tuning{Forward: now} }}
			e, err := NewEngine(config, family, proxier.Deps{})
			netnstest.Check(t, err)
			defer func() { _ = e.Close() }()
			var open *netns.Flow
			for _, now = range []Forward{ForwardMasquerade, ForwardDirect, ForwardTunnel, ForwardMasquerade} {
				s := service("web", vip, real)
				s.Frontends[0].Masquerade = desired.MasqueradeAll
				u := familyOf(family, s)
				if _, err := e.Apply(t.Context(), u); err != nil {
					t.Fatalf("%v: Apply = %v", now, err)
				}
				to := netip.AddrPortFrom(netip.MustParseAddr(vip), 80)
				answer, err := netns.Ask(t.Context(), w.client, "tcp", to, netns.AskOptions{})
				if err != nil {
					t.Fatalf("%v: %v, want an answer\n%s", now, err, w.run("ipvsadm", "-Ln"))
				}
				if kept := answer.Source.Addr() == netip.MustParseAddr(client); kept != (now != ForwardMasquerade) {
					t.Errorf("%v: the server saw %v; the client is %s", now, answer.Source, client)
				}
				if open == nil {
					open, err = netns.Open(t.Context(), w.client, "tcp", to, netns.AskOptions{})
					netnstest.Check(t, err)
					defer func() { _ = open.Close() }()
				}
				if _, err := open.Ask(t.Context()); err != nil {
					t.Errorf("%v: the open connection: %v, want an answer", now, err)
				}
				report, err := e.Verify(t.Context(), u)
				if err != nil || len(report.Differences) > 0 {
					t.Errorf("%v: Verify = %v, %v", now, report.Differences, err)
				}
				if now == ForwardMasquerade {
					continue
				}
				other := service("web", vip, real, ofFamily(family, "192.0.2.10:8080", "[2001:db8:f2::2]:8080"))
				result, err := e.Apply(t.Context(), familyOf(family, other))
				if err != nil || len(result.Failed) != 1 || !result.Failed[0].Terminal {
					t.Errorf("%v: Apply with an endpoint at another port = %v, %v, want a failure that waits for a change", now, result.Failed, err)
				}
			}
		})
	}
}

// TestTwoEnginesShareAServicePort: IPVS forwards to the external IP directly, and nftables translates the ClusterIP of the same
// service port. Verify finds no difference.
func TestTwoEnginesShareAServicePort(t *testing.T) {
	w := newTriangle(t)
	netnstest.Serve(t, w.server, "server", 80)
	const external = "198.51.100.9"
	netnstest.Check(t, w.server.AddAddrs("lo", netip.MustParsePrefix(external+"/32")))
	edge, err := proxier.NamesFor("edge")
	netnstest.Check(t, err)
	direct, err := NewEngine(Config{Config: proxier.Config{NetNS: w.ns, Names: edge}, SetSysctls: true, Forward: ForwardDirect}, v1.IPv4Protocol, proxier.Deps{})
	netnstest.Check(t, err)
	inside := proxier.Config{NetNS: w.ns, Names: proxier.DefaultNames()}
	inside.Masquerade.Mark = 1 << 20
	translating, err := nftables.NewEngine(nftables.Config{Config: inside}, v1.IPv4Protocol, proxier.Deps{})
	netnstest.Check(t, err)
	both, err := hybrid.New(func(_ *desired.Service, kind desired.Kind) string {
		return map[bool]string{true: "direct", false: "translating"}[kind == desired.ExternalIP]
	}, hybrid.Member{Name: "translating", Engine: translating}, hybrid.Member{Name: "direct", Engine: direct})
	netnstest.Check(t, err)
	defer func() { _ = both.Close() }()
	s := withFrontend(service("web", webVIP, "192.0.2.10:80"), desired.ExternalIP, external, 80)
	for i := range s.Frontends {
		s.Frontends[i].Masquerade = desired.MasqueradeAll
	}
	u := familyOf(v1.IPv4Protocol, s)
	if result, err := both.Apply(t.Context(), u); err != nil || len(result.Failed) > 0 {
		t.Fatalf("Apply = %v, %v", result.Failed, err)
	}
	for vip, keeps := range map[string]bool{external: true, webVIP: false} {
		answer, err := netns.Ask(t.Context(), w.client, "tcp", netip.AddrPortFrom(netip.MustParseAddr(vip), 80), netns.AskOptions{})
		if err != nil || (answer.Source.Addr() == netip.MustParseAddr("192.0.2.5")) != keeps {
			t.Errorf("%s: the server saw %v, %v; want the client's address: %v", vip, answer.Source, err, keeps)
		}
	}
	report, err := both.Abilities().Verify(t.Context(), u)
	if err != nil || len(report.Differences) > 0 {
		t.Errorf("Verify = %v, %v", report.Differences, err)
	}
}
