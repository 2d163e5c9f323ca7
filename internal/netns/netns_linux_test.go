package netns_test

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is two hosts with a cable, and a server on each.
func pair(t *testing.T) (a, b *netns.NS) {
	t.Helper()
	a, b = netnstest.New(t), netnstest.New(t)
	netnstest.Connect(t, a, []string{"192.0.2.1/24", "2001:db8::1/64"}, b, []string{"192.0.2.2/24", "192.0.2.3/24", "2001:db8::2/64", "2001:db8::3/64"})
	netnstest.Serve(t, b, "b", 8080)
	return a, b
}

func TestDoRunsInsideAndThreadsComeHome(t *testing.T) {
	ns := netnstest.New(t)
	home := inode(t, "/proc/self/ns/net")
	var inside string
	if err := ns.Do(func() error { inside = inode(t, "/proc/thread-self/ns/net"); return nil }); err != nil {
		t.Fatalf("Do: %v", err)
	}
	if want := inode(t, ns.Path()); inside != want {
		t.Errorf("Do ran in %s, want %s, which is what Path leads to", inside, want)
	}
	if inside == home {
		t.Errorf("Do ran in the namespace %s of the process", home)
	}
	for range 50 { // on different threads
		var got string
		var wait sync.WaitGroup
		wait.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			got = inode(t, "/proc/thread-self/ns/net")
		})
		wait.Wait()
		if got != home {
			t.Fatalf("a thread is left in %s, want all in %s", got, home)
		}
	}
}

func TestDoReportsAFunctionThatEndsItsGoroutine(t *testing.T) {
	ns := netnstest.New(t)
	if err := ns.Do(func() error { runtime.Goexit(); return nil }); !errors.Is(err, netns.ErrGoexit) {
		t.Errorf("Do = %v, want ErrGoexit", err)
	}
}

func TestSysctlsBelongToTheNamespace(t *testing.T) {
	a, b := netnstest.New(t), netnstest.New(t)
	if err := a.Forward(); err != nil {
		t.Fatalf("Forward: %v", err)
	}
	for name, ns := range map[string]*netns.NS{"1": a, "0": b} {
		if got, err := ns.Sysctl("net/ipv4/ip_forward"); err != nil || got != name {
			t.Errorf("ip_forward = %q, %v, want %s", got, err, name)
		}
	}
	if err := a.SetSysctl("net/ipv4/no_such_parameter", "1"); err == nil || !strings.Contains(err.Error(), "no_such_parameter") {
		t.Errorf("SetSysctl of an unknown name = %v, want an error that names it", err)
	}
}

func TestConnectedHostsTalkAtOnce(t *testing.T) {
	a, _ := pair(t)
	for _, c := range []struct{ network, from, to string }{
		{"tcp", "192.0.2.1", "192.0.2.2:8080"},
		{"udp", "192.0.2.1", "192.0.2.3:8080"},
		{"tcp", "2001:db8::1", "[2001:db8::2]:8080"},
		{"udp", "2001:db8::1", "[2001:db8::3]:8080"},
	} {
		to := netip.MustParseAddrPort(c.to)
		began := time.Now()
		got, err := netns.Ask(t.Context(), a, c.network, to, netns.AskOptions{From: netip.MustParseAddr(c.from)})
		if err != nil {
			t.Errorf("Ask %s %s: %v", c.network, to, err)
			continue
		}
		if got.Server != "b" || got.Source.Addr().String() != c.from || got.Local != to {
			t.Errorf("Ask %s %s = %+v, want server b at %s, source %s", c.network, to, got, to, c.from)
		}
		t.Logf("%s %s answered after %v", c.network, to, time.Since(began))
	}
	if err := netns.Ping(t.Context(), a, netip.MustParseAddr("192.0.2.2"), netns.AskOptions{}); err != nil {
		t.Errorf("Ping over IPv4: %v", err)
	}
	if err := netns.Ping(t.Context(), a, netip.MustParseAddr("2001:db8::2"), netns.AskOptions{}); err != nil {
		t.Errorf("Ping over IPv6: %v", err)
	}
}

// Otherwise the conntrack entry of a connection that got no answer decides about a later one, and
// IPVS mixes up connections to several VIPs.
func TestNoSourcePortIsUsedTwice(t *testing.T) {
	a, b := pair(t)
	const others = 50 // the kernel begins at a port of its own for each
	for i := range uint16(others) {
		netnstest.Serve(t, b, "other", 9000+i)
	}
	for from, to := range map[string]string{"192.0.2.1": "192.0.2.2:8080", "2001:db8::1": "[2001:db8::2]:8080"} {
		used := map[string]bool{}
		for i := range 500 { // if they were drawn from 14,000, two would be the same
			conn, err := a.DialFrom(t.Context(), "tcp", netip.MustParseAddr(from), strings.Replace(to, "8080", strconv.Itoa(9000+i%others), 1))
			netnstest.Check(t, err)
			port := conn.LocalAddr().String()
			if used[port] {
				t.Fatalf("%s is used again after %d connections to %s", port, len(used), to)
			}
			used[port] = true
			netnstest.Check(t, conn.(*net.TCPConn).SetLinger(0)) // the port is not in TIME_WAIT
			netnstest.Check(t, conn.Close())
		}
	}
}

// Without neighbor discovery, a busy machine cannot make it fail.
func TestNoHostSearchesForItsNeighbors(t *testing.T) {
	a, b := pair(t)
	for host, want := range map[*netns.NS]int{a: 4, b: 2} {
		netnstest.Check(t, host.Do(func() error {
			known, err := netlink.NeighList(0, netlink.FAMILY_ALL)
			known = slices.DeleteFunc(known, func(n netlink.Neigh) bool { return n.State != netlink.NUD_PERMANENT })
			if len(known) != want {
				t.Errorf("permanent neighbors %v, want %d", known, want)
			}
			return err
		}))
	}
}

func TestAFlowKeepsItsSource(t *testing.T) {
	a, _ := pair(t)
	for _, network := range []string{"tcp", "udp"} {
		flow, err := netns.Open(t.Context(), a, network, netip.MustParseAddrPort("192.0.2.2:8080"), netns.AskOptions{})
		if err != nil {
			t.Fatalf("Open: %v", err)
		}
		first, err := flow.Ask(t.Context())
		second, again := flow.Ask(t.Context())
		if err != nil || again != nil || first != second {
			t.Errorf("%s flow answered %+v (%v) and then %+v (%v), want the same", network, first, err, second, again)
		}
		if err := flow.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
}

func TestOutcomesAreToldApart(t *testing.T) {
	a, b := pair(t)
	if err := a.AddRoute(netip.MustParsePrefix("198.51.100.0/24"), netip.MustParseAddr("192.0.2.2")); err != nil {
		t.Fatalf("AddRoute: %v", err)
	}
	if err := b.Forward(); err != nil {
		t.Fatalf("Forward: %v", err)
	}
	discard := func(action int, dst string) {
		t.Helper()
		prefix := netip.MustParsePrefix(dst)
		if err := addSpecialRoute(b, prefix, action); err != nil {
			t.Fatalf("add route to %s: %v", dst, err)
		}
	}
	discard(6, "198.51.100.1/32") // RTN_BLACKHOLE
	discard(7, "198.51.100.2/32") // RTN_UNREACHABLE
	for _, c := range []struct {
		to   string
		want error
	}{
		{"192.0.2.2:9", netns.ErrRefused},
		{"198.51.100.1:9", netns.ErrTimeout},
		{"198.51.100.2:9", netns.ErrUnreachable},
		{"203.0.113.1:9", netns.ErrUnreachable},
	} {
		for _, network := range []string{"tcp", "udp"} {
			_, err := netns.Ask(t.Context(), a, network, netip.MustParseAddrPort(c.to), netns.AskOptions{Timeout: 1500 * time.Millisecond})
			if !errors.Is(err, c.want) {
				t.Errorf("Ask %s %s = %v, want %v", network, c.to, err, c.want)
			}
		}
	}
	if err := netns.Ping(t.Context(), a, netip.MustParseAddr("198.51.100.2"), netns.AskOptions{}); !errors.Is(err, netns.ErrUnreachable) {
		t.Errorf("Ping = %v, want ErrUnreachable", err)
	}
}

func TestABridgeJoinsItsPorts(t *testing.T) {
	node, pod := netnstest.New(t), netnstest.New(t)
	if err := node.AddBridge("cni0", netip.MustParsePrefix("10.244.1.1/24")); err != nil {
		t.Fatalf("AddBridge: %v", err)
	}
	err := netns.Connect(netns.Plug{NS: node, Link: "pod0"},
		netns.Plug{NS: pod, Link: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.244.1.2/24")}})
	if err != nil {
		t.Fatalf("Connect: %v", err)
	}
	if err := node.Enslave("pod0", "cni0"); err != nil {
		t.Fatalf("Enslave: %v", err)
	}
	netnstest.Serve(t, pod, "pod", 8080)
	got, err := netns.Ask(t.Context(), node, "tcp", netip.MustParseAddrPort("10.244.1.2:8080"), netns.AskOptions{})
	if err != nil || got.Server != "pod" || got.Source.Addr().String() != "10.244.1.1" {
		t.Errorf("Ask through the bridge = %+v, %v, want pod, asked by 10.244.1.1", got, err)
	}
}

func TestEveryAddressOfARangeAnswers(t *testing.T) {
	a, b := pair(t)
	for _, c := range []struct{ block, via, to string }{
		{"10.244.64.0/20", "192.0.2.2", "10.244.70.7:8080"},
		{"fd00:10:244:64::/64", "2001:db8::2", "[fd00:10:244:64::77]:8080"},
	} {
		if err := b.AddRange(netip.MustParsePrefix(c.block)); err != nil {
			t.Fatalf("AddRange: %v", err)
		}
		if err := a.AddRoute(netip.MustParsePrefix(c.block), netip.MustParseAddr(c.via)); err != nil {
			t.Fatalf("AddRoute: %v", err)
		}
		for _, network := range []string{"tcp", "udp"} {
			got, err := netns.Ask(t.Context(), a, network, netip.MustParseAddrPort(c.to), netns.AskOptions{})
			if err != nil || got.Local.String() != c.to {
				t.Errorf("Ask %s %s = %+v, %v, want an answer from there", network, c.to, got, err)
			}
		}
	}
}

func TestAClosedServerRefuses(t *testing.T) {
	a, b := netnstest.New(t), netnstest.New(t)
	netnstest.Connect(t, a, []string{"192.0.2.1/24"}, b, []string{"192.0.2.2/24"})
	server := netnstest.Serve(t, b, "b", 8080)
	to := netip.MustParseAddrPort("192.0.2.2:8080")
	if _, err := netns.Ask(t.Context(), a, "tcp", to, netns.AskOptions{}); err != nil {
		t.Fatalf("Ask: %v", err)
	}
	if err := server.Close(); err != nil {
		t.Fatalf("Close: %v", err)
	}
	for _, network := range []string{"tcp", "udp"} {
		if _, err := netns.Ask(t.Context(), a, network, to, netns.AskOptions{}); !errors.Is(err, netns.ErrRefused) {
			t.Errorf("Ask %s after Close = %v, want ErrRefused", network, err)
		}
	}
}

func TestErrorsNameLinkAndAddress(t *testing.T) {
	ns := netnstest.New(t)
	err := ns.AddAddrs("nosuch0", netip.MustParsePrefix("192.0.2.1/24"))
	if err == nil || !strings.Contains(err.Error(), "nosuch0") || !strings.Contains(err.Error(), "192.0.2.1/24") {
		t.Errorf("AddAddrs = %v, want an error that names nosuch0 and 192.0.2.1/24", err)
	}
	if err := ns.AddRoute(netip.MustParsePrefix("198.51.100.0/24"), netip.MustParseAddr("192.0.2.9")); err == nil {
		t.Error("AddRoute via an address out of reach succeeded")
	}
}

func addSpecialRoute(ns *netns.NS, dst netip.Prefix, action int) error {
	return ns.Do(func() error {
		network, err := netlink.ParseIPNet(dst.String())
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Dst: network, Type: action})
	})
}

func inode(t *testing.T, path string) string {
	t.Helper()
	target, err := os.Readlink(path)
	if err != nil {
		t.Fatalf("readlink: %v", err)
	}
	return target
}
