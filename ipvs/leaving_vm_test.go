//go:build vm

package ipvs_test

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// leave runs a Leaving until the returned function is called, which returns its error.
func (n *node) leave(drain time.Duration) (l *ipvs.Leaving, end func() error) {
	n.t.Helper()
	l, err := ipvs.NewLeaving(ipvs.Config{Config: n.world.Config(), Drain: drain}, proxier.Deps{})
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(n.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	return l, func() error { stop(); return <-ended }
}

// nftables runs the nftables engine until the returned function is called.
func (n *node) nftables() (stop func()) {
	n.t.Helper()
	config := n.world.Config()
	config.Runner = runner.Options{MinInterval: runner.Unlimited}
	p, err := nftables.New(nftables.Config{Config: config}, proxier.Deps{})
	if err != nil {
		n.t.Fatal(err)
	}
	stop = poll.Background(n.t, p.Run)
	p.OnServiceAdd(web())
	p.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0]))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	if err := proxiertest.Sync(n.t.Context(), p); err != nil {
		n.t.Fatal(err)
	}
	return stop
}

// TestLeavingGoesOnAfterARestart: while an open connection drains, the VIP is no address,
// and its other ports are refused. A new process continues, and so does the engine itself
// if it returns. After the deadline nothing is left.
func TestLeavingGoesOnAfterARestart(t *testing.T) {
	n := newNode(t)
	n.proxy.OnServiceAdd(web())
	n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0]))
	n.synced()
	flow := n.open()
	alive := func(when string) {
		t.Helper()
		if _, err := flow.Ask(t.Context()); err != nil {
			t.Errorf("%s: the open connection: %v, want an answer", when, err)
		}
		n.everybody(n.world.LocalPods[0])
	}
	n.stop()
	stop := n.nftables()
	for _, when := range []string{"at first", "after a restart"} {
		l, end := n.leave(time.Hour)
		poll.Until(t, "the connection is counted", func() bool { return l.Connections() > 0 })
		alive(when)
		if got := n.run("ip", "addr"); strings.Contains(got, webVIP) || strings.Contains(got, n.device()) {
			t.Errorf("%s: addresses are\n%swant neither device nor VIP", when, got)
		}
		to := netip.MustParseAddrPort(webVIP + ":31999") // the node itself listens there
		_, err := n.world.LocalPods[2].Ask(t.Context(), "tcp", to, proxiertest.AskOptions{Timeout: 5 * time.Second})
		if !errors.Is(err, proxiertest.ErrRefused) {
			t.Errorf("%s: another port of the VIP: %v, want a refusal", when, err)
		}
		if err := end(); err != nil {
			t.Errorf("%s: Run = %v, want nil", when, err)
		}
	}
	stop()

	n.start()
	n.proxy.OnServiceAdd(web())
	n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0]))
	n.synced()
	alive("when the engine has returned")
	if got := n.run("nft", "list", "tables"); strings.Contains(got, "leaving") {
		t.Errorf("when the engine has returned, nft lists\n%swant no table of the change", got)
	}
	if got := n.run("ip", "route", "show", "table", "local"); strings.Contains(got, webVIP+" dev lo ") {
		t.Errorf("when the engine has returned, local routes are\n%swant that of the address only", got)
	}
	n.stop()

	stop = n.nftables()
	defer stop()
	l, end := n.leave(5 * time.Second)
	poll.Until(t, "the table of the change is gone", func() bool {
		return !strings.Contains(n.run("nft", "list", "tables"), "ipvs")
	})
	if err := end(); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	if l.Connections() != 0 || strings.Contains(n.run("ipvsadm", "-Ln"), "TCP") {
		t.Errorf("after the deadline there are %d connections and\n%swant nothing", l.Connections(), n.run("ipvsadm", "-Ln"))
	}
	n.everybody(n.world.LocalPods[0])
}
