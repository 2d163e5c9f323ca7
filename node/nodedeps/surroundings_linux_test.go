package nodedeps_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// What keeps packets from endpoints is found for each family alone, while settings change.
func TestWhatIsFound(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	node := changetracker.Node{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/24"), netip.MustParsePrefix("fd00:244::/64")}}
	check := nodedeps.Surroundings(proxier.Config{NetNS: ns.Path()})
	want := func(what string, found ...string) {
		t.Helper()
		all := check(t.Context(), node)
		var got []string
		for _, c := range all {
			setting, rest, _ := strings.Cut(c.Message, " is ")
			got = append(got, string(c.Family)+" "+setting)
			if c.Type != "Forwarding" || c.Since.IsZero() || !strings.Contains(rest, "set it to 1") {
				t.Errorf("%s: condition %+v", what, c)
			}
		}
		if !slices.Equal(got, found) {
			t.Errorf("%s: found %q, want %q", what, got, found)
		}
	}
	const forward4, forward6, bridge4, bridge6 = "IPv4 net.ipv4.ip_forward", "IPv6 net.ipv6.conf.all.forwarding",
		"IPv4 net.bridge.bridge-nf-call-iptables", "IPv6 net.bridge.bridge-nf-call-ip6tables"
	want("at first", forward4, forward6)
	netnstest.Check(t, ns.Forward())
	want("with forwarding")
	netnstest.Check(t, ns.SetSysctl("net/ipv6/conf/all/forwarding", "0"))
	want("without that of IPv6", forward6)
	netnstest.Check(t, ns.Forward())

	var there bool
	netnstest.Check(t, ns.Do(func() error {
		_, err := os.Stat("/proc/sys/net/bridge")
		there = err == nil
		return nil
	}))
	filter := func(four, six string) {
		if there {
			netnstest.Check(t, ns.SetSysctl("net/bridge/bridge-nf-call-iptables", four))
			netnstest.Check(t, ns.SetSysctl("net/bridge/bridge-nf-call-ip6tables", six))
		}
	}
	filter("0", "0")
	netnstest.Check(t, ns.AddBridge("docker0", netip.MustParsePrefix("172.17.0.1/16")))
	want("with a bridge of others")
	netnstest.Check(t, ns.AddBridge("cni0", netip.MustParsePrefix("10.244.0.1/24")))
	want("with a bridge of pods", bridge4)
	netnstest.Check(t, ns.AddAddrs("cni0", netip.MustParsePrefix("fd00:244::1/64")))
	want("with both families", bridge4, bridge6)
	if there { // else module br_netfilter is missing, and so is every packet of bridges
		filter("1", "0")
		want("with one family filtered", bridge6)
		filter("1", "1")
		want("with both filtered")
		filter("0", "0")
	}
	node.PodCIDRs = nil
	want("as long as no pods are known")
	for setting, of := range map[string]string{"net/ipv4/ip_forward": forward4, "net/ipv6/conf/all/forwarding": forward6} {
		netnstest.Check(t, ns.SetSysctl(setting, "0"))
		node = changetracker.Node{}
		want("as long as nothing is known")
		for text, is := range map[string]string{"192.0.2.1": forward4, "2001:db8::1": forward6} {
			node.Addresses = []netip.Addr{netip.MustParseAddr(text), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")}
			if is == of {
				want("with an address of the family first", of)
			} else {
				want("with an address of the other family first")
			}
		}
		netnstest.Check(t, ns.Forward())
	}
	check = nodedeps.Surroundings(proxier.Config{
		NetNS: ns.Path(), Families: []v1.IPFamily{v1.IPv4Protocol}, Masquerade: proxier.Masquerade{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}},
	})
	want("with a range of all pods, of one family", bridge4)
}

// TestAStrictPathFilter: packets from behind another device are dropped, and that is found while it happens.
func TestAStrictPathFilter(t *testing.T) {
	t.Parallel()
	node, client := netnstest.New(t), netnstest.New(t)
	netnstest.Check(t, netns.Connect(netns.Plug{NS: node, Link: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}}, netns.Plug{NS: client, Link: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/24")}}))
	netnstest.Check(t, netns.Connect(netns.Plug{NS: node, Link: "eth1", Addrs: []netip.Prefix{netip.MustParsePrefix("198.51.100.1/24")}}, netns.Plug{NS: client, Link: "eth1", Addrs: []netip.Prefix{netip.MustParsePrefix("198.51.100.2/24")}}))
	netnstest.Check(t, errors.Join(node.Forward(), node.SetSysctl("net/ipv4/conf/all/rp_filter", "0"), node.SetSysctl("net/ipv4/conf/eth0/rp_filter", "0")))
	check := nodedeps.Surroundings(proxier.Config{NetNS: node.Path(), Families: []v1.IPFamily{v1.IPv4Protocol}})
	messages := func() (all []string) {
		for _, c := range check(t.Context(), changetracker.Node{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}) {
			all = append(all, c.Message)
		}
		return all
	}
	for _, c := range []struct {
		filter  string
		packets int
		found   bool
	}{{"1", 0, false}, {"1", 9, false}, {"1", 20, true}, {"1", 0, false}, {"2", 20, false}, {"1", 20, true}, {"0", 20, false}} {
		netnstest.Check(t, node.SetSysctl("net/ipv4/conf/eth1/rp_filter", c.filter))
		netnstest.Check(t, client.Do(func() error { // from the address of eth0, through eth1
			conn, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(192, 0, 2, 2)}, &net.UDPAddr{IP: net.IPv4(198, 51, 100, 1), Port: 9})
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			for range c.packets {
				_, _ = conn.Write([]byte("?")) // where nothing is dropped, nobody listens
			}
			return nil
		}))
		var got []string
		poll.Until(t, "the packets have arrived", func() bool {
			got = append(got, messages()...)
			return (len(got) > 0) == c.found
		})
		if c.found && !strings.Contains(got[0], "rp_filter is 1 for eth1, and") {
			t.Errorf("%+v: found %q, want eth1", c, got)
		}
	}
}

// TestABridgeWithoutRules: what is found is so. A pod's connection to a Service leads to another pod of the bridge.
func TestABridgeWithoutRules(t *testing.T) {
	t.Parallel()
	node, client, server := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	prefixes := func(n int) []netip.Prefix {
		return []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.244.0.%d/24", n)), netip.MustParsePrefix(fmt.Sprintf("fd00:244::%d/64", n))}
	}
	netnstest.Check(t, node.AddBridge("cni0", prefixes(1)...))
	for name, pod := range map[string]*netns.NS{"client": client, "server": server} {
		n := map[string]int{"client": 2, "server": 3}[name]
		netnstest.Check(t, errors.Join(netns.Connect(netns.Plug{NS: node, Link: name}, netns.Plug{NS: pod, Link: "eth0", Addrs: prefixes(n)}), node.Enslave(name, "cni0")))
		for _, everywhere := range []string{"0.0.0.0/0", "::/0"} {
			all := netip.MustParsePrefix(everywhere)
			gateway := prefixes(1)[0].Addr()
			if all.Addr().Is6() {
				gateway = prefixes(1)[1].Addr()
			}
			netnstest.Check(t, pod.AddRoute(all, gateway))
		}
	}
	netnstest.Check(t, node.Forward())
	netnstest.Serve(t, server, "server", 8080)
	config := proxier.Config{NetNS: node.Path(), Node: changetracker.Node{Name: "node", PodCIDRs: []netip.Prefix{prefixes(1)[0].Masked(), prefixes(1)[1].Masked()}}}
	p, err := nftables.New(nftables.Config{Config: config}, proxier.Deps{Surroundings: nodedeps.Surroundings(config)})
	netnstest.Check(t, err)
	p.OnServiceAdd(proxiertest.Service("test", "web", proxiertest.ClusterIPs("10.96.0.10", "fd00:96::10"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	for i, family := range []discovery.AddressType{discovery.AddressTypeIPv4, discovery.AddressTypeIPv6} {
		p.OnEndpointSliceAdd(proxiertest.Slice("test", "web", family, proxiertest.SliceName(string(family)), proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint(prefixes(3)[i].Addr().String())))
	}
	settings := []string{"net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"}
	values := []string{"0", "1"}
	if err := node.SetSysctl(settings[0], "0"); errors.Is(err, fs.ErrNotExist) {
		settings, values = nil, values[:1] // without module br_netfilter
	}
	set := func(value string) {
		for _, setting := range settings {
			netnstest.Check(t, node.SetSysctl(setting, value))
		}
	}
	set("0")
	proxiertest.Run(t, p)
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))
	for _, value := range values {
		set(value)
		for _, vip := range []string{"10.96.0.10:80", "[fd00:96::10]:80"} {
			_, err := netns.Ask(t.Context(), client, "tcp", netip.MustParseAddrPort(vip), netns.AskOptions{Timeout: time.Second})
			if (err == nil) != (value == "1") {
				t.Errorf("bridge-nf-call is %s: connection to %s: %v", value, vip, err)
			}
		}
		found := map[string]int{"0": 2, "1": 0}[value]
		poll.Until(t, fmt.Sprint(found, " conditions"), func() bool { return len(p.Status().Conditions) == found })
	}
}
