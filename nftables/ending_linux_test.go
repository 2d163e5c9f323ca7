package nftables_test

import (
	"errors"
	"strings"
	"testing"

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
	net := proxiertest.NewTopology(t)
	pod, addr := net.LocalPods[0], net.LocalPods[0].Addr(v1.IPv4Protocol)
	netnstest.Run(t, net.Node, "nft", "add", "table", "ip", table)
	tables := func() string { return netnstest.Run(t, net.Node, "nft", "list", "ruleset") }
	config := nftables.Config{Config: net.Config()}
	config.Names = proxier.DefaultNames()
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.EndConnections = true }
	i := startInstance(t, config, "10.96.0.1", pod)
	poll.Until(t, "the table of the killed process is gone", func() bool { return !strings.Contains(tables(), table) })
	flow, err := net.Client.Open(t.Context(), "tcp", i.vip, proxiertest.AskOptions{Timeout: poll.Timeout})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = flow.Close() }()
	if _, err := flow.Ask(t.Context()); err != nil {
		t.Fatal(err)
	}
	netnstest.Run(t, net.Node, "ip", "route", "add", "blackhole", addr.String()+"/32")
	netnstest.Run(t, net.Client, "nft", "add table ip lost; add chain ip lost in { type filter hook input priority 0; policy drop; }")
	i.OnEndpointSliceDelete(proxiertest.Slice("default", "web", discovery.AddressTypeIPv4))
	poll.Until(t, "a table ends the connection", func() bool {
		return strings.Contains(tables(), "reject with tcp reset") && strings.Contains(tables(), table)
	})
	netnstest.Run(t, net.Node, "nft", "delete", "table", "ip", table)
	poll.Until(t, "the table is back", func() bool { return strings.Contains(tables(), table) })
	if s := i.Status().Families[v1.IPv4Protocol]; s.ConnectionsEnding != 1 || s.ConnectionsEnded != 0 {
		t.Errorf("status %+v, want one connection that is open", s)
	}
	netnstest.Run(t, net.Client, "nft", "delete", "table", "ip", "lost")
	poll.Until(t, "the client gets its RST", func() bool {
		s := i.Status().Families[v1.IPv4Protocol]
		return s.ConnectionsEnding == 0 && s.ConnectionsEnded == 1
	})
	if _, err := flow.Ask(t.Context()); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("the client gets %v, want a RST", err)
	}
	poll.Until(t, "no table is left", func() bool { return !strings.Contains(tables(), table) })
}
