package conntrack_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// table is the conntrack table of a network namespace.
type table struct {
	tb testing.TB
	ns *netns.NS
	h  *netlink.Handle
}

func newTable(tb testing.TB) *table {
	tb.Helper()
	ns := netnstest.New(tb)
	var h *netlink.Handle
	err := ns.Do(func() (err error) {
		h, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(h.Close)
	return &table{tb, ns, h}
}

// entry is a conntrack entry: the client, the dialled address, and the server that answers.
type entry struct {
	protocol                uint8
	client, dialled, server netip.AddrPort
	tcpState                uint8
}

func (t *table) add(e entry) {
	t.tb.Helper()
	t.write(e, t.h.ConntrackCreate)
}

func (t *table) write(e entry, by func(netlink.ConntrackTableType, netlink.InetFamily, *netlink.ConntrackFlow) error) {
	t.tb.Helper()
	flow := &netlink.ConntrackFlow{
		FamilyType: unix.AF_INET,
		Forward:    tuple(e.protocol, e.client, e.dialled),
		Reverse:    tuple(e.protocol, e.server, e.client),
		TimeOut:    600,
	}
	family := netlink.InetFamily(unix.AF_INET)
	if e.client.Addr().Is6() {
		flow.FamilyType, family = unix.AF_INET6, unix.AF_INET6
	}
	if e.protocol == unix.IPPROTO_TCP {
		flow.ProtoInfo = &netlink.ProtoInfoTCP{State: e.tcpState}
	}
	if err := by(netlink.ConntrackTable, family, flow); err != nil {
		t.tb.Fatalf("write %+v: %v", e, err)
	}
}

func tuple(protocol uint8, from, to netip.AddrPort) netlink.IPTuple {
	return netlink.IPTuple{
		Protocol: protocol,
		SrcIP:    from.Addr().AsSlice(), SrcPort: from.Port(),
		DstIP: to.Addr().AsSlice(), DstPort: to.Port(),
	}
}

// clients returns the clients of all flows, by their ports.
func (t *table) clients(family netlink.InetFamily) []uint16 {
	t.tb.Helper()
	flows, err := t.h.ConntrackTableList(netlink.ConntrackTable, family)
	if err != nil {
		t.tb.Fatalf("list: %v", err)
	}
	var ports []uint16
	for _, f := range flows {
		ports = append(ports, f.Forward.SrcPort)
	}
	slices.Sort(ports)
	return ports
}

func at(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

// The kernel forgets only UDP flows unless the options include others, and only unanswered connections of TCP.
func TestTheKernelForgetsStaleFlowsOnly(t *testing.T) {
	t.Parallel()
	check := func(vip, server string, loopback bool) desired.FlowCheck {
		c := desired.FlowCheck{LoopbackNodePorts: loopback, NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}}
		for _, p := range []desired.Protocol{desired.TCP, desired.UDP, desired.SCTP} {
			c.Frontends = append(c.Frontends,
				desired.Flows{Key: desired.Key{VIP: netip.MustParseAddr(vip), Protocol: p, Port: 53}, Serving: desired.EndpointsOf(at(server))},
				desired.Flows{Key: desired.Key{Protocol: p, Port: 30053}, Serving: desired.EndpointsOf(at(server))})
		}
		return c
	}
	const established, synSent = 3, 1
	for name, c := range map[string]struct {
		options  conntrack.Options
		loopback bool // accepts node ports
		want     []uint16
	}{
		"UDP":            {conntrack.Options{}, false, []uint16{1, 3, 6, 7, 8, 9, 10, 11}},
		"loopback too":   {conntrack.Options{}, true, []uint16{1, 3, 6, 8, 9, 10}},
		"unanswered TCP": {conntrack.Options{UnansweredTCP: true}, false, []uint16{1, 3, 6, 7, 8, 10, 11}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tab := newTable(t)
			if err := tab.ns.AddAddrs("lo", netip.MustParsePrefix("192.0.2.1/32")); err != nil {
				t.Fatal(err)
			}
			udp, tcp := uint8(unix.IPPROTO_UDP), uint8(unix.IPPROTO_TCP)
			for _, e := range []entry{
				{udp, at("198.51.100.9:1"), at("10.96.0.1:53"), at("10.244.0.1:53"), 0}, // serving endpoint
				{udp, at("198.51.100.9:2"), at("10.96.0.1:53"), at("10.244.0.2:53"), 0}, // deleted endpoint
				{udp, at("198.51.100.9:3"), at("10.96.0.1:54"), at("10.244.0.2:53"), 0}, // another port
				{udp, at("198.51.100.9:4"), at("10.96.0.1:53"), at("10.96.0.1:53"), 0},  // not translated
				{udp, at("198.51.100.9:5"), at("192.0.2.1:30053"), at("10.244.0.2:53"), 0},
				{udp, at("198.51.100.9:6"), at("192.0.2.2:30053"), at("10.244.0.2:53"), 0}, // of another node
				{udp, at("127.0.0.1:7"), at("127.0.0.1:30053"), at("127.0.0.1:30053"), 0},
				{udp, at("127.0.0.1:11"), at("127.9.9.9:30053"), at("10.244.0.2:53"), 0}, // all of 127.0.0.0/8 belongs to the node
				{tcp, at("198.51.100.9:8"), at("10.96.0.1:53"), at("10.244.0.2:53"), established},
				{tcp, at("198.51.100.9:9"), at("10.96.0.1:53"), at("10.244.0.2:53"), synSent},
				{tcp, at("198.51.100.9:10"), at("10.96.0.1:53"), at("10.244.0.1:53"), synSent},
			} {
				tab.add(e)
			}
			tab.add(entry{udp, at("[2001:db8::9]:2"), at("[fd00::1]:53"), at("[fd00:244::2]:53"), 0})
			c.options.NetNS = tab.ns.Path()
			cleaner := conntrack.New(c.options)
			deleted, err := cleaner.Clean(t.Context(), v1.IPv4Protocol, check("10.96.0.1", "10.244.0.1:53", c.loopback))
			if err != nil || deleted != 11-len(c.want) {
				t.Errorf("deleted %d, %v; want %d", deleted, err, 11-len(c.want))
			}
			if got := tab.clients(unix.AF_INET); !slices.Equal(got, c.want) {
				t.Errorf("flows of clients %v are left, want %v", got, c.want)
			}
			if got := tab.clients(unix.AF_INET6); len(got) != 1 {
				t.Errorf("%d flows of IPv6 are left, want it untouched", len(got))
			}
			if deleted, err = cleaner.Clean(t.Context(), v1.IPv6Protocol, check("fd00::1", "[fd00:244::1]:53", c.loopback)); err != nil || deleted != 1 {
				t.Errorf("deleted %d of IPv6, %v; want 1", deleted, err)
			}
		})
	}
}

// Untranslated connections of TCP without an answer are forgotten, whatever the options are, and whether the kernel
// lists all entries or only these.
func TestUntranslatedConnectionsAreForgotten(t *testing.T) {
	t.Parallel()
	for _, ranges := range [][]netip.Prefix{nil, {netip.MustParsePrefix("10.96.0.0/16")}} {
		t.Run(fmt.Sprint(ranges), func(t *testing.T) { forgetUntranslated(t, ranges) })
	}
}

func forgetUntranslated(t *testing.T, ranges []netip.Prefix) {
	t.Helper()
	const established, synSent = 3, 1
	tab, tcp := newTable(t), uint8(unix.IPPROTO_TCP)
	for _, e := range []entry{
		{tcp, at("198.51.100.9:1"), at("10.96.0.1:53"), at("10.96.0.1:53"), synSent},
		{tcp, at("198.51.100.9:2"), at("10.96.0.1:53"), at("10.96.0.1:53"), established},
		{tcp, at("198.51.100.9:3"), at("10.96.0.1:54"), at("10.96.0.1:54"), synSent},  // another port
		{tcp, at("198.51.100.9:4"), at("10.96.0.1:53"), at("10.244.0.1:53"), synSent}, // serving endpoint
		{tcp, at("198.51.100.9:5"), at("10.96.0.1:53"), at("10.244.0.2:53"), synSent}, // deleted endpoint
	} {
		tab.add(e)
	}
	deleted, err := conntrack.New(conntrack.Options{NetNS: tab.ns.Path()}).Clean(t.Context(), v1.IPv4Protocol, desired.FlowCheck{
		Untranslated: []desired.Flows{{
			Key:     desired.Key{VIP: netip.MustParseAddr("10.96.0.1"), Protocol: desired.TCP, Port: 53},
			Serving: desired.EndpointsOf(at("10.244.0.1:53")),
		}},
		ServiceCIDRs: ranges,
	})
	if got := tab.clients(unix.AF_INET); err != nil || deleted != 1 || !slices.Equal(got, []uint16{2, 3, 4, 5}) {
		t.Errorf("Clean = %d, %v; flows of clients %v are left; want only that of client 1 deleted", deleted, err, got)
	}
}

// TestAConnectionThatIsAnsweredMeanwhileStays: an entry of TCP that a dump has as unanswered may be a
// connection when it is to be deleted.
func TestAConnectionThatIsAnsweredMeanwhileStays(t *testing.T) {
	t.Parallel()
	const established = 3
	tab := newTable(t)
	answered := entry{unix.IPPROTO_TCP, at("198.51.100.9:1"), at("10.96.0.1:53"), at("10.244.0.2:53"), netlinkx.TCPSynSent}
	tab.add(answered)
	tab.add(entry{unix.IPPROTO_TCP, at("198.51.100.9:2"), at("10.96.0.1:53"), at("10.244.0.2:53"), netlinkx.TCPSynSent})
	s, err := netlinkx.Open(tab.ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	deleted, err := netlinkx.DeleteFlows(s, unix.AF_INET, netlinkx.Which{}, func(f *netlinkx.Flow) bool {
		if f.Source == answered.client && f.TCPState != established {
			update := answered
			update.tcpState = established
			tab.write(update, tab.h.ConntrackUpdate)
		}
		return f.TCPState == netlinkx.TCPSynSent
	})
	if got := tab.clients(unix.AF_INET); err != nil || deleted != 1 || !slices.Equal(got, []uint16{1}) {
		t.Errorf("DeleteFlows = %d, %v; flows of clients %v are left; want only that of client 2 deleted", deleted, err, got)
	}
}

func TestWithoutPrivilegeTheErrorSaysSo(t *testing.T) {
	netnstest.Unprivileged(t, func(t *testing.T) {
		check := desired.FlowCheck{ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}
		_, err := conntrack.New(conntrack.Options{}).Clean(t.Context(), v1.IPv4Protocol, check)
		if !errors.Is(err, proxier.ErrPermission) {
			t.Errorf("Clean = %v, want ErrPermission", err)
		}
	})
}

// BenchmarkClean measures how a thousand stale flows among 100,000 are found.
func BenchmarkClean(b *testing.B) {
	const flows, stale = 100_000, 1_000
	b.Run(fmt.Sprintf("flows=%d/stale=%d", flows, stale), func(b *testing.B) {
		tab := newTable(b)
		fill := func(from, to int, server string) {
			for i := from; i < to; i++ {
				client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 16), byte(i >> 8)}), 1024+uint16(i%256))
				tab.add(entry{unix.IPPROTO_UDP, client, at("10.96.0.1:53"), at(server), 0})
			}
		}
		fill(stale, flows, "10.244.0.1:53")
		check := desired.FlowCheck{Frontends: []desired.Flows{{
			Key:     desired.Key{VIP: netip.MustParseAddr("10.96.0.1"), Protocol: desired.UDP, Port: 53},
			Serving: desired.EndpointsOf(at("10.244.0.1:53")),
		}}}
		cleaner := conntrack.New(conntrack.Options{NetNS: tab.ns.Path()})
		var total time.Duration
		for range b.N {
			fill(0, stale, "10.244.0.2:53")
			start := time.Now()
			deleted, err := cleaner.Clean(b.Context(), v1.IPv4Protocol, check)
			total += time.Since(start)
			if err != nil || deleted != stale {
				b.Fatalf("deleted %d, %v; want %d", deleted, err, stale)
			}
		}
		b.ReportMetric(float64(total.Microseconds())/1000/float64(b.N), "ms")
		b.ReportMetric(0, "ns/op")
	})
}

// TestConnectionsInAZoneDoNotEnd: others may have their addresses.
func TestConnectionsInAZoneDoNotEnd(t *testing.T) {
	client, server := netnstest.New(t), netnstest.New(t)
	netnstest.Connect(t, client, []string{"192.0.2.3/24", "192.0.2.4/24", "192.0.2.5/24"}, server, []string{"192.0.2.1/24"})
	netnstest.Serve(t, server, "server", 8080)
	netnstest.Run(t, server, "nft", "add table ip zones; add chain ip zones in { type filter hook prerouting priority raw; }; "+
		"add chain ip zones out { type filter hook output priority raw; }; add chain ip zones nat { type nat hook prerouting priority dstnat; }; "+
		"add rule ip zones in ip saddr 192.0.2.4 ct zone set 5; add rule ip zones out ip daddr 192.0.2.4 ct zone set 5; "+
		"add rule ip zones in ip saddr 192.0.2.5 ct original zone set 5; add rule ip zones nat tcp dport 80 redirect to :8080")
	vip := netip.MustParseAddrPort("192.0.2.1:80")
	check := desired.FlowCheck{End: []desired.Flows{{Key: desired.Key{VIP: vip.Addr(), Protocol: desired.TCP, Port: vip.Port()}}}}
	for from, want := range map[string]int{"192.0.2.3": 1, "192.0.2.4": 0, "192.0.2.5": 0} {
		flow, err := netns.Open(t.Context(), client, "tcp", vip, netns.AskOptions{From: netip.MustParseAddr(from)})
		netnstest.Check(t, err)
		cleaner := conntrack.New(conntrack.Options{NetNS: server.Path()})
		_, err = cleaner.Clean(t.Context(), v1.IPv4Protocol, check)
		netnstest.Check(t, err)
		if open, _, _ := cleaner.EndingStatus(v1.IPv4Protocol); open != want {
			t.Errorf("%d connections from %s must end, want %d", open, from, want)
		}
		netnstest.Check(t, flow.Abort())
	}
}
