package endpointhealth_test

import (
	"context"
	"maps"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// world is a network with a Provider and a Checker on its node.
type world struct {
	*proxiertest.Topology
	t       *testing.T
	checker *endpointhealth.Checker
}

var vips = map[v1.IPFamily]netip.AddrPort{
	v1.IPv4Protocol: netip.MustParseAddrPort("10.96.0.10:80"), v1.IPv6Protocol: netip.MustParseAddrPort("[fd00:10:96::10]:80"),
}

func newWorld(t *testing.T, policy endpointhealth.CheckPolicy) *world {
	t.Helper()
	w := &world{Topology: proxiertest.NewTopology(t), t: t}
	config := w.Config()
	config.Runner = runner.Options{MinInterval: runner.Unlimited}
	p, err := nftables.New(nftables.Config{Config: config}, proxier.Deps{})
	netnstest.Check(t, err)
	p.OnServiceAdd(proxiertest.Service("default", "web", proxiertest.ClusterIPs(vips[v1.IPv4Protocol].Addr().String(), vips[v1.IPv6Protocol].Addr().String()),
		proxiertest.Port("http", v1.ProtocolTCP, 80)))
	for family := range vips {
		parts := []proxiertest.SliceOption{proxiertest.SliceName(string(family)), proxiertest.SlicePort("http", v1.ProtocolTCP, 8080)}
		for _, pod := range w.RemotePods {
			parts = append(parts, proxiertest.Endpoint(pod.Addr(family).String()))
		}
		p.OnEndpointSliceAdd(proxiertest.Slice("default", "web", discovery.AddressType(family), parts...))
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	w.checker, err = endpointhealth.New(endpointhealth.Options{
		NetNS: config.NetNS, Logger: zaptest.NewLogger(t), Pause: 50 * time.Millisecond,
		Choose: always(policy),
	})
	netnstest.Check(t, err)
	poll.Background(t, p.Run)
	poll.Background(t, func(ctx context.Context) error { return w.checker.Run(ctx, p) })
	poll.Background(t, func(ctx context.Context) error {
		return conntrack.ReportConnections(ctx, config.NetNS, w.checker.Suspect)
	})
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))
	return w
}

// nft changes the rules of a host.
func (w *world) nft(host *proxiertest.Host, script string) {
	w.t.Helper()
	netnstest.Run(w.t, host, "nft", script)
}

// servers returns who answers 40 connections to the VIP of each family, and how many get no
// answer.
func (w *world) servers() (names []string, failed int) {
	seen := map[string]bool{}
	for _, vip := range vips {
		for range 40 { // one of three endpoints is missed once in 10 million times
			a, err := w.LocalPods[0].Ask(w.t.Context(), "tcp", vip, proxiertest.AskOptions{Timeout: 300 * time.Millisecond})
			if err != nil {
				return nil, 1
			}
			seen[a.Server] = true
		}
	}
	return slices.Sorted(maps.Keys(seen)), 0
}

// expect waits until exactly these servers answer, and every connection is answered.
func (w *world) expect(what string, want ...string) {
	w.t.Helper()
	poll.Until(w.t, what, func() bool {
		got, failed := w.servers()
		return failed == 0 && slices.Equal(got, want)
	})
}

// ejected lists the addresses of the ejected endpoints.
func (w *world) ejected() (list []netip.Addr) {
	for _, e := range w.checker.Status().Unusual {
		if e.State == endpointhealth.StateEjected {
			list = append(list, e.Endpoint.Addr())
		}
	}
	return list
}

// An endpoint that stops answering, by silence or by refusing, gets no connections after its second failed check,
// in both families, and gets some again (EHC-01, with packets).
func TestPackets(t *testing.T) {
	t.Parallel()
	w := newWorld(t, endpointhealth.CheckPolicy{
		Probe: endpointhealth.TCPProbe{}, Interval: 500 * time.Millisecond, Timeout: 500 * time.Millisecond, EjectFor: 100 * time.Millisecond,
	})
	w.expect("at first", "remote-0", "remote-1", "remote-2")
	sick := w.RemotePods[1]
	for _, verdict := range []string{"drop", "reject with tcp reset"} {
		w.nft(sick, "add table inet sick; add chain inet sick in { type filter hook input priority 0; }; add rule inet sick in tcp dport 8080 "+verdict)
		poll.Until(t, "ejected: "+verdict, func() bool { return slices.Equal(w.ejected(), sick.Addrs) })
		w.expect(verdict, "remote-0", "remote-2")
		w.nft(sick, "delete table inet sick")
		poll.Until(t, "returned: "+verdict, func() bool { return w.checker.Status().Ejected == 0 })
		w.expect("without "+verdict, "remote-0", "remote-1", "remote-2")
	}
}

// knock opens some connections in both families, whether they are answered or not.
func (w *world) knock() {
	for range 10 {
		for _, vip := range vips {
			_, _ = w.LocalPods[0].Ask(w.t.Context(), "tcp", vip, proxiertest.AskOptions{Timeout: 50 * time.Millisecond})
		}
	}
}

// Connections through a Service that an endpoint does not answer eject it, and so do refused ones (EHC-20, with
// packets). The others go on.
func TestPassivePackets(t *testing.T) {
	t.Parallel()
	w := newWorld(t, endpointhealth.CheckPolicy{PassiveFailures: 2, MaxEjected: 0.7, EjectFor: 5 * time.Minute})
	w.expect("at first", "remote-0", "remote-1", "remote-2")
	for _, c := range []struct {
		verdict, timeout string // of SYN_SENT, in seconds
		sick             *proxiertest.Host
		left             []string
	}{
		{"drop", "1", w.RemotePods[1], []string{"remote-0", "remote-2"}},
		{"reject with tcp reset", "120", w.RemotePods[2], []string{"remote-0"}},
	} {
		netnstest.Check(t, w.Node.Do(func() error {
			return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_syn_sent", []byte(c.timeout), 0)
		}))
		w.nft(c.sick, "add table inet sick; add chain inet sick in { type filter hook input priority 0; }; add rule inet sick in tcp dport 8080 "+c.verdict)
		poll.Until(t, "ejected: "+c.verdict, func() bool {
			w.knock()
			return slices.Contains(w.ejected(), c.sick.Addrs[0]) && slices.Contains(w.ejected(), c.sick.Addrs[1])
		})
		w.expect(c.verdict, c.left...)
	}
	if s := w.checker.Status(); s.Passed != 0 || s.Failures < s.Ejections || s.Returns != 0 {
		t.Errorf("status %+v, want a failed check for each ejection, and no returns", s)
	}
}

// A client alone ejects nothing (EHC-21, with packets): an endpoint does not answer this client, as with a network
// policy, or packets that never reach it. It answers the node, and stays.
func TestAClientAloneEjectsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, endpointhealth.CheckPolicy{PassiveFailures: 2, EjectFor: 5 * time.Minute})
	netnstest.Check(t, w.Node.Do(func() error {
		return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_syn_sent", []byte("1"), 0)
	}))
	pod := w.LocalPods[0]
	w.nft(w.RemotePods[1], "add table inet closed; add chain inet closed in { type filter hook input priority 0; }; "+
		"add rule inet closed in ip saddr "+pod.Addr(v1.IPv4Protocol).String()+" drop; add rule inet closed in ip6 saddr "+pod.Addr(v1.IPv6Protocol).String()+" drop")
	poll.Until(t, "the endpoint is checked in both families", func() bool {
		w.knock()
		return w.checker.Status().Passed >= 4
	})
	if s := w.checker.Status(); s.Ejections != 0 || s.Failures != 0 {
		t.Errorf("status %+v, want no ejection", s)
	}
}
