//go:build vm

package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

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
			config := Config{Config: proxier.Config{NetNS: w.ns, Names: proxier.DefaultNames()}, SetSysctls: true, Choose: func(*desired.Service) Tuning { return Tuning{Forward: now} }}
			e, err := newEngine(config, family, proxier.Deps{})
			netnstest.Check(t, err)
			defer func() { _ = e.Close() }()
			to := netip.AddrPortFrom(netip.MustParseAddr(vip), 80)
			ask := func(network string, patience time.Duration) (netns.Answer, error) {
				return netns.Ask(t.Context(), w.client, network, to, netns.AskOptions{Timeout: patience})
			}
			programs := func(services ...*desired.Service) proxier.Result {
				t.Helper()
				u := familyOf(family, services...)
				result, err := e.Apply(t.Context(), u)
				report, differs := e.Verify(t.Context(), u)
				if err != nil || differs != nil || len(report.Differences) > 0 {
					t.Fatalf("%v: Apply = %v, Verify = %v, %v", now, err, report.Differences, differs)
				}
				return result
			}
			var open *netns.Flow
			for _, now = range []ForwardingMethod{ForwardMasquerade, ForwardDirect, ForwardTunnel, ForwardMasquerade} {
				tcp, udp := service("web", vip, real), service("dns", vip, real)
				udp.Protocol = desired.UDP
				for _, s := range []*desired.Service{tcp, udp} {
					s.Frontends[0].Masquerade = desired.MasqueradeAll
				}
				if failed := programs(tcp, udp).Failed; len(failed) > 0 {
					t.Fatalf("%v: Apply = %v", now, failed)
				}
				for _, network := range []string{"tcp", "udp"} {
					answer, err := ask(network, 0)
					if err != nil {
						t.Fatalf("%v: %s: %v, want an answer\n%s", now, network, err, w.run("ipvsadm", "-Ln"))
					}
					if kept := answer.Source.Addr() == netip.MustParseAddr(client); kept != (now != ForwardMasquerade) {
						t.Errorf("%v: %s: the server saw %v; the client is %s", now, network, answer.Source, client)
					}
				}
				if open == nil {
					open, err = netns.Open(t.Context(), w.client, "tcp", to, netns.AskOptions{})
					netnstest.Check(t, err)
					defer func() { _ = open.Close() }()
				}
				if _, err := open.Ask(t.Context()); err != nil {
					t.Errorf("%v: the open connection: %v, want an answer", now, err)
				}
				if now == ForwardMasquerade {
					continue
				}
				others := service("web", vip, real)
				others.Frontends[0].Restricted, others.Frontends[0].SourceRanges = true, []netip.Prefix{netip.PrefixFrom(to.Addr(), to.Addr().BitLen())}
				programs(others, udp)
				if _, err := ask("tcp", 2*time.Second); !errors.Is(err, netns.ErrTimeout) {
					t.Errorf("%v: a client outside of the source ranges: %v, want %v", now, err, netns.ErrTimeout)
				}
				result := programs(service("web", vip, real, ofFamily(family, "192.0.2.10:8080", "[2001:db8:f2::2]:8080")), udp)
				if len(result.Failed) != 1 || !result.Failed[0].Terminal {
					t.Errorf("%v: with an endpoint at another port = %v, want a failure that waits for a change", now, result.Failed)
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
	direct, err := newEngine(Config{Config: proxier.Config{NetNS: w.ns, Names: edge}, SetSysctls: true, Forward: ForwardDirect}, v1.IPv4Protocol, proxier.Deps{})
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
