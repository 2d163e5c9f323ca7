package nftables_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestConnectionsEndWithoutARouteToTheirPod: CT-12, PKT-94. The node has a blackhole where the
// pod was, as with Calico. One client's packets get lost at first, and another program flushes
// all rules in the meantime. What a process left that was killed goes with the first sync, and
// everything with the last connection.
func TestConnectionsEndWithoutARouteToTheirPod(t *testing.T) {
	t.Parallel()
	const table = "serviceplane.ending"
	nodes := proxiertest.NewTopology(t)
	pod, addr := nodes.LocalPods[0], nodes.LocalPods[0].Addr(v1.IPv4Protocol)
	netnstest.Run(t, nodes.Node, "nft", "add", "table", "ip", table)
	tables := func() string { return netnstest.Run(t, nodes.Node, "nft", "list", "ruleset") }
	config := nftables.Config{Config: nodes.Config()}
	config.Names = proxier.DefaultNames()
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.EndConnections = true }
	i := startInstance(t, config, "10.96.0.1", pod)
	poll.Until(t, "the table of the killed process is gone", func() bool { return !strings.Contains(tables(), table) })
	flow, err := nodes.Client.Open(t.Context(), "tcp", i.vip, proxiertest.AskOptions{Timeout: poll.Timeout})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = flow.Close() }()
	if _, err := flow.Ask(t.Context()); err != nil {
		t.Fatal(err)
	}
	netnstest.Run(t, nodes.Node, "ip", "route", "add", "blackhole", addr.String()+"/32")
	netnstest.Run(t, nodes.Client, "nft", "add table ip lost; add chain ip lost in { type filter hook input priority 0; policy drop; }")
	i.OnEndpointSliceDelete(proxiertest.Slice("default", "web", discovery.AddressTypeIPv4))
	poll.Until(t, "a table ends the connection", func() bool {
		return strings.Contains(tables(), "reject with tcp reset") && strings.Contains(tables(), table)
	})
	netnstest.Run(t, nodes.Node, "nft", "delete", "table", "ip", table)
	poll.Until(t, "the table is back", func() bool { return strings.Contains(tables(), table) })
	if s := i.Status().Families[v1.IPv4Protocol]; s.ConnectionsEnding != 1 || s.ConnectionsEnded != 0 {
		t.Errorf("status %+v, want one connection that is open", s)
	}
	netnstest.Run(t, nodes.Client, "nft", "delete", "table", "ip", "lost")
	poll.Until(t, "the client gets its RST", func() bool {
		s := i.Status().Families[v1.IPv4Protocol]
		return s.ConnectionsEnding == 0 && s.ConnectionsEnded == 1
	})
	if _, err := flow.Ask(t.Context()); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("the client gets %v, want a RST", err)
	}
	poll.Until(t, "no table is left", func() bool { return !strings.Contains(tables(), table) })
}

// TestALostRSTIsSentAgain: CT-12. The client only waits, without keepalive.
func TestALostRSTIsSentAgain(t *testing.T) {
	t.Parallel()
	nodes := proxiertest.NewTopology(t)
	config := nftables.Config{Config: nodes.Config()}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.EndConnections = true }
	i := startInstance(t, config, "10.96.0.1", nodes.LocalPods[0])
	var conn *net.TCPConn
	netnstest.Check(t, nodes.Client.Do(func() (err error) {
		conn, err = net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(i.vip))
		return err
	}))
	defer func() { _ = conn.Close() }()
	netnstest.Check(t, errors.Join(conn.SetKeepAlive(false), conn.SetDeadline(time.Now().Add(poll.Timeout))))
	netnstest.Run(t, nodes.Client, "nft", "add table ip lost; add chain ip lost in { type filter hook input priority 0; }; "+
		"add rule ip lost in tcp flags rst limit rate 1/day burst 1 packets counter drop")
	i.OnEndpointSliceDelete(proxiertest.Slice("default", "web", discovery.AddressTypeIPv4))
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the client gets %v, want a RST", err)
	}
	if rules := netnstest.Run(t, nodes.Client, "nft", "list table ip lost"); !strings.Contains(rules, "packets 1 ") {
		t.Errorf("want a RST that got lost:\n%s", rules)
	}
	poll.Until(t, "the connection has ended", func() bool { return i.Status().Families[v1.IPv4Protocol].ConnectionsEnded == 1 })
}

// TestAClientMayComeBack: CT-12. The clients of two connections hear nothing while their endpoint goes, and the
// proxy starts again. One gives up, and connects again from the same port: nothing ends this
// connection. The other one gets its RST from the table that the first process has left.
func TestAClientMayComeBack(t *testing.T) {
	t.Parallel()
	for _, vip := range []string{"10.96.0.1", "fd00:10:96::1"} {
		t.Run(vip, func(t *testing.T) {
			t.Parallel()
			testAClientComesBack(t, netip.MustParseAddr(vip))
		})
	}
}

func testAClientComesBack(t *testing.T, vip netip.Addr) {
	t.Helper()
	nodes := proxiertest.NewTopology(t)
	config := nftables.Config{Config: nodes.Config()}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.EndConnections = true }
	i := startInstance(t, config, vip.String(), nodes.LocalPods[0])
	dial := func(port int) (conn *net.TCPConn) {
		t.Helper()
		netnstest.Check(t, nodes.Client.Do(func() (err error) {
			conn, err = net.DialTCP("tcp", &net.TCPAddr{Port: port}, net.TCPAddrFromAddrPort(i.vip))
			return err
		}))
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	ask := func(conn *net.TCPConn) error {
		_ = conn.SetDeadline(time.Now().Add(poll.Timeout))
		if _, err := conn.Write([]byte("\n")); err != nil {
			return err
		}
		_, err := bufio.NewReader(conn).ReadString('\n')
		return err
	}
	const returns, stays = 4321, 4322
	old, other := dial(returns), dial(stays)
	netnstest.Check(t, errors.Join(ask(old), ask(other)))
	netnstest.Run(t, nodes.Client, "nft", "add table inet lost; add chain inet lost in { type filter hook input priority 0; }; add rule inet lost in meta l4proto tcp drop; "+
		"add chain inet lost out { type filter hook output priority 0; }; add rule inet lost out tcp flags rst drop")
	listed := func(port int) bool {
		return strings.Contains(netnstest.Run(t, nodes.Node, "nft", "list ruleset"), fmt.Sprintf(" . %d . %s . 80", port, vip))
	}
	family := netlink.InetFamily(netlink.FAMILY_V4)
	if vip.Is6() {
		family = netlink.FAMILY_V6
	}
	i.OnEndpointSliceDelete(proxiertest.Slice("default", "web", addressType(vip)))
	poll.Until(t, "both are listed, and conntrack has neither", func() bool {
		var entries []*netlink.ConntrackFlow
		netnstest.Check(t, nodes.Node.Do(func() (err error) {
			entries, err = netlink.ConntrackTableList(netlink.ConntrackTable, family)
			return err
		}))
		return listed(returns) && listed(stays) && !slices.ContainsFunc(entries, func(f *netlink.ConntrackFlow) bool { return f.Forward.DstPort == 80 })
	})
	i.stop()
	next := startInstance(t, config, vip.String(), nodes.LocalPods[1])
	netnstest.Check(t, old.SetLinger(0))
	_ = old.Close()
	if !listed(returns) || !listed(stays) {
		t.Error("the table that the first process has left does not list both connections")
	}
	netnstest.Run(t, nodes.Client, "nft", "delete table inet lost")
	again := dial(returns)
	if listed(returns) {
		t.Error("the new connection has the addresses of one that must end")
	}
	if err := ask(other); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("the client that stayed gets %v, want a RST", err)
	}
	if err := ask(again); err != nil {
		t.Errorf("the client that came back: %v", err)
	}
	next.stop()
	netnstest.Check(t, next.Cleanup(t.Context()))
	if rules := netnstest.Run(t, nodes.Node, "nft", "list ruleset"); strings.Contains(rules, "ending") {
		t.Errorf("after Cleanup the kernel has\n%s", rules)
	}
}
