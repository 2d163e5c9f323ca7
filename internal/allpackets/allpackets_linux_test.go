package allpackets

import (
	"flag"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/google/nftables"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/iptables"
	nftengine "github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

var (
	firstSeed = flag.Uint64("allpackets.seed", 0, "the first seed; 0 takes a new one")
	seeds     = flag.Int("allpackets.seeds", 1, "how many seeds")
)

// engine makes a Provider in a network namespace, and reads its rules.
type engine struct {
	name string
	// servicesPass is the trait ServiceIPsPass.
	servicesPass bool

	make func(proxier.Config, proxier.Deps) (*proxier.Proxier, error)
	read func(*netns.NS, v1.IPFamily) (ruleset, error)
}

// engines are all, but of the modes of ebpf one by chance, if there is one seed.
func engines(t *testing.T, seed uint64) []engine {
	t.Helper()
	all := []engine{
		{name: "nftables", make: func(c proxier.Config, d proxier.Deps) (*proxier.Proxier, error) {
			return nftengine.New(nftengine.Config{Config: c}, d)
		}, read: readNFTables},
		iptablesEngine(iptables.VariantNFT, "nft"),
		iptablesEngine(iptables.VariantLegacy, "legacy"),
	}
	for _, podsKeepSource := range []bool{false, true} {
		if *seeds > 1 || podsKeepSource == (seed%2 == 1) {
			all = append(all, socketsEngine(t, podsKeepSource))
		}
	}
	return all
}

func iptablesEngine(variant iptables.Variant, name string) engine {
	return engine{
		name: "iptables-" + name, servicesPass: true,
		make: func(c proxier.Config, d proxier.Deps) (*proxier.Proxier, error) {
			return iptables.New(iptables.Config{Config: c, Variant: variant}, d)
		},
		read: func(ns *netns.NS, family v1.IPFamily) (ruleset, error) { return readIPTables(ns, family, name) },
	}
}

func readNFTables(ns *netns.NS, family v1.IPFamily) (ruleset, error) {
	file, err := os.Open(ns.Path())
	if err != nil {
		return nil, err
	}
	defer file.Close()
	of := nftables.TableFamilyIPv4
	if family == v1.IPv6Protocol {
		of = nftables.TableFamilyIPv6
	}
	return readTable(int(file.Fd()), of, proxier.DefaultNames().Table)
}

// TestAllPackets programs clusters of 50 Services, and compares what the rules do with what
// the oracle says, for each packet that a State distinguishes.
func TestAllPackets(t *testing.T) {
	seed := seedOf(t)
	for _, e := range engines(t, seed) {
		t.Run(e.name, func(t *testing.T) {
			seen := map[string]int{}
			for i := range *seeds {
				compare(t, e, seed+uint64(i), seen)
			}
			for _, what := range []string{"forward", "drop", "reject", "pass", "masquerade"} {
				if seen[what] < 100 {
					t.Errorf("%s: seen %d times, want 100 or more: the clusters are too tame", what, seen[what])
				}
			}
			t.Logf("%d packets, of which %v", seen["packets"], seen)
		})
	}
}

func families() []v1.IPFamily { return []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} }

func seedOf(t *testing.T) uint64 {
	t.Helper()
	if *firstSeed == 0 {
		*firstSeed = rand.Uint64N(1 << 32)
	}
	t.Logf("replay with -allpackets.seed=%d -allpackets.seeds=%d", *firstSeed, *seeds)
	return *firstSeed
}

// compare compares all packets after the first sync, and after each of two changes.
func compare(t *testing.T, e engine, seed uint64, seen map[string]int) {
	m, ns := newMaker(seed), netnstest.New(t)
	c := m.cluster()
	p := start(t, e, c, ns)
	for round := range 3 {
		if err := proxiertest.Sync(t.Context(), p); err != nil {
			t.Errorf("seed %d, round %d: %v", seed, round, err)
		}
		for _, family := range families() {
			rules, err := e.read(ns, family)
			if err != nil {
				t.Fatalf("read the rules of %s: %v", family, err)
			}
			verdicts := oracle.NewVerdicts(c, family)
			verdicts.ServiceIPsPass = e.servicesPass
			if comparePackets(t, rules, packets(c, family, verdicts), verdicts, seen); t.Failed() {
				t.Fatalf("seed %d, round %d", seed, round)
			}
		}
		m.change(c, p)
	}
}

func comparePackets(t *testing.T, rules ruleset, all []oracle.Packet, verdicts *oracle.Verdicts, seen map[string]int) {
	wrong := 0
	for _, p := range all {
		got, err := outcomes(rules, p, verdicts.IsLocal)
		if err != nil {
			t.Fatalf("%+v: %v", p, err)
		}
		want := verdicts.Of(p)
		count(seen, want)
		if sockets, is := rules.(*socketRules); is {
			want = sockets.keepSource(p, want)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%v from %v (node: %v) to %v:\n%v, want\n%v", p.Protocol, p.Source, p.FromNode, p.Destination, got, want)
			if wrong++; wrong == 5 {
				t.Fatal("and so on")
			}
		}
	}
}

func count(seen map[string]int, all []oracle.Outcome) {
	seen["packets"]++
	seen[all[0].Verdict]++
	if all[0].Masquerade {
		seen["masquerade"]++
	}
}

// start runs the engine until the test ends.
func start(t *testing.T, e engine, c *oracle.Cluster, ns *netns.NS) *proxier.Proxier {
	config := proxier.Config{
		Node: c.Node, NetNS: ns.Path(), DenyNodeExternalIPs: c.DenyNodeExternalIPs,
		Tracker:    c.Tracker(),
		Masquerade: proxier.Masquerade{All: c.MasqueradeAll, NodePodCIDRs: c.DetectsPods},
		NodePorts:  proxier.NodePorts{Addresses: c.NodePortAddresses},
	}
	p, err := e.make(config, proxier.Deps{Logger: zaptest.NewLogger(t, zaptest.Level(zap.ErrorLevel)), Health: proxier.NoHealth()})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range c.Services {
		p.OnServiceAdd(s)
	}
	for _, s := range c.Slices {
		p.OnEndpointSliceAdd(s)
	}
	p.OnServiceCIDRsChanged(c.ServiceCIDRs)
	proxiertest.Run(t, p)
	return p
}

// packets are one of each class. For destinations without a frontend, few sources do.
func packets(c *oracle.Cluster, family v1.IPFamily, verdicts *oracle.Verdicts) (all []oracle.Packet) {
	is4 := family == v1.IPv4Protocol
	sources := sources(c, is4)
	for _, dst := range destinations(c, is4) {
		for _, port := range ports(c) {
			for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP, desired.SCTP} {
				to := netip.AddrPortFrom(dst, port)
				from := sources
				if !verdicts.IsServed(protocol, to) && len(sources) > 3 { // the node, and a client
					from = []source{sources[0], sources[3]}
				}
				for _, s := range from {
					all = append(all, oracle.Packet{Protocol: protocol, Source: netip.AddrPortFrom(s.addr, 40000), Destination: to, FromNode: s.isNode})
				}
			}
		}
	}
	return all
}

type source struct {
	addr   netip.Addr
	isNode bool
}

// sources are the node, pods, clients, endpoints, and the ends of source ranges with their
// neighbours.
func sources(c *oracle.Cluster, is4 bool) []source {
	node := parsed(netip.MustParseAddr, "192.0.2.10", "2001:db8::10")
	pods := parsed(netip.MustParseAddr, "10.244.1.5", "10.244.1.99", "10.244.2.6", "10.244.200.1", "fd00:244:1::5", "fd00:244:1::99", "fd00:244:2::6", "2001:db8:5::9")
	all := []source{
		{node[0], true},
		{node[1], true},
		{pods[0], false},
		{pods[4], false},
		{pods[1], false},
		{pods[5], false},
		{netip.MustParseAddr("203.0.113.250"), false},
		{netip.MustParseAddr("2001:db8:9::9"), false},
	}
	for _, a := range c.Node.Addresses {
		all = append(all, source{a, true}, source{a, false})
	}
	edges := slices.Clone(pods)
	for _, s := range c.Services {
		ranges := slices.Concat(oracle.Denied(s, v1.IPv4Protocol), oracle.Denied(s, v1.IPv6Protocol))
		for _, text := range s.Spec.LoadBalancerSourceRanges {
			ranges = append(ranges, netip.MustParsePrefix(text))
		}
		for _, r := range ranges {
			edges = append(edges, r.Addr(), r.Addr().Prev(), last(r), last(r).Next())
		}
		for _, ingress := range s.Status.LoadBalancer.Ingress {
			all = append(all, source{netip.MustParseAddr(ingress.IP), true})
		}
	}
	for _, slice := range c.Slices {
		for _, e := range slice.Endpoints {
			edges = append(edges, netip.MustParseAddr(e.Addresses[0]))
		}
	}
	for _, a := range edges {
		all = append(all, source{a, false})
	}
	seen := map[source]bool{}
	return slices.DeleteFunc(all, func(s source) bool {
		unwanted := seen[s] || !s.addr.IsValid() || s.addr.Is4() != is4
		seen[s] = true
		return unwanted
	})
}

func last(p netip.Prefix) netip.Addr {
	bytes := p.Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(bytes); bit++ {
		bytes[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(bytes)
	return a
}

// destinations are all VIPs, the node, loopback, a free ClusterIP, an endpoint, and others.
func destinations(c *oracle.Cluster, is4 bool) []netip.Addr {
	set := map[netip.Addr]bool{}
	for _, a := range parsed(netip.MustParseAddr, "127.0.0.1", "127.0.0.5", "10.96.1.1", "10.244.2.6", "8.8.8.8", "::1", "fd00:96::f0f0", "fd00:244:2::6", "2001:db8:ffff::1") {
		set[a] = true
	}
	for _, a := range c.Node.Addresses {
		set[a] = true
	}
	for _, s := range c.Services {
		vips := slices.Concat(s.Spec.ClusterIPs, s.Spec.ExternalIPs)
		for _, ingress := range s.Status.LoadBalancer.Ingress {
			vips = append(vips, ingress.IP)
		}
		for _, vip := range vips {
			if a, err := netip.ParseAddr(vip); err == nil { // not "None"
				set[a] = true
			}
		}
	}
	maps.DeleteFunc(set, func(a netip.Addr, _ bool) bool { return a.Is4() != is4 })
	return slices.SortedFunc(maps.Keys(set), netip.Addr.Compare)
}

// ports are all ports of Services, and their neighbours.
func ports(c *oracle.Cluster) []uint16 {
	set := map[uint16]bool{}
	for _, s := range c.Services {
		for _, port := range s.Spec.Ports {
			for _, n := range []int32{port.Port, port.NodePort} {
				set[uint16(n-1)], set[uint16(n)], set[uint16(n+1)] = true, true, true
			}
		}
	}
	delete(set, 0)
	return slices.Sorted(maps.Keys(set))
}
