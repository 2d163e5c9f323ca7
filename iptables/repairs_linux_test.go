package iptables

import (
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestFlowsThatBeganWithoutRulesAreTranslated: a change repairs the table nat, before anybody
// has noticed that it was flushed. A datagram and a SYN have passed meanwhile, and the kernel
// remembers that their flows are not translated. The clients still get an answer.
func TestFlowsThatBeganWithoutRulesAreTranslated(t *testing.T) {
	for _, variant := range []Variant{VariantNFT, VariantLegacy} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			w := &world{t, netnstest.New(t), variant, proxier.DefaultNames()}
			anywhere := netip.MustParsePrefix("0.0.0.0/0")
			client, server := netnstest.New(t), netnstest.New(t)
			for link, end := range map[string]struct {
				ns         *netns.NS
				node, here string
			}{"clients": {client, "10.1.0.1/24", "10.1.0.2/24"}, "servers": {server, "10.2.0.1/24", "10.2.0.2/24"}} {
				node := netip.MustParsePrefix(end.node)
				netnstest.Check(t, netns.Connect(
					netns.Plug{NS: w.ns, Link: link, Addrs: []netip.Prefix{node}},
					netns.Plug{NS: end.ns, Link: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix(end.here)}}))
				netnstest.Check(t, end.ns.AddRoute(anywhere, node.Addr()))
			}
			netnstest.Serve(t, server, "server", 53)
			netnstest.Check(t, w.ns.Forward())
			netnstest.Check(t, w.ns.AddRoute(anywhere, netip.MustParseAddr("10.2.0.2")))

			p := w.startUnwatched()
			p.OnServiceAdd(proxiertest.Service("test", "dns", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("dns", v1.ProtocolUDP, 53), proxiertest.Port("dns-tcp", v1.ProtocolTCP, 53)))
			p.OnEndpointSliceAdd(proxiertest.Slice("test", "dns", discovery.AddressTypeIPv4, proxiertest.SlicePort("dns", v1.ProtocolUDP, 53), proxiertest.SlicePort("dns-tcp", v1.ProtocolTCP, 53), proxiertest.Endpoint("10.2.0.2")))
			p.OnServiceSynced()
			p.OnEndpointSlicesSynced()
			w.sync(p)

			to := netip.MustParseAddrPort("10.96.0.10:53")
			w.iptables("-t", "nat", "-F")
			flow, err := netns.Open(t.Context(), client, "udp", to, netns.AskOptions{Timeout: time.Second})
			netnstest.Check(t, err)
			defer func() { netnstest.Check(t, flow.Close()) }()
			if a, err := flow.Ask(t.Context()); err == nil {
				t.Fatalf("an answer without rules: %+v", a)
			}
			answered := make(chan error, 1)
			go func() {
				_, err := netns.Ask(t.Context(), client, "tcp", to, netns.AskOptions{})
				answered <- err
			}()
			poll.Until(t, "the first packet of a TCP connection has passed", func() bool { return w.hasSYNTo(to) })
			add(p, 1, 2) // the sync of another Service repairs
			w.sync(p)
			if !poll.Soon(func() bool { _, err := flow.Ask(t.Context()); return err == nil }) {
				t.Errorf("no answer after the repair")
			}
			select {
			case err := <-answered:
				netnstest.Check(t, err)
			case <-time.After(poll.Timeout):
				t.Errorf("the TCP connection is not made after the repair")
			}
		})
	}
}

// startUnwatched runs a Provider that looks for damage only when it writes.
func (w *world) startUnwatched() *proxier.Proxier {
	w.t.Helper()
	config := w.config().WithDefaults()
	deps := proxier.Deps{Conntrack: conntrack.New(conntrack.Options{NetNS: config.NetNS})}
	p, err := lightdeps.Provider(config.Config, deps, func(family v1.IPFamily) (*engine, error) {
		e, err := newEngine(config, family, deps)
		if err == nil {
			e.watchPeriod = time.Hour
		}
		return e, err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	poll.Background(w.t, p.Run)
	return p
}

// hasSYNTo reports whether connection tracking has a TCP connection to an address.
func (w *world) hasSYNTo(to netip.AddrPort) (found bool) {
	w.t.Helper()
	netnstest.Check(w.t, w.ns.Do(func() error {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		for _, f := range flows {
			found = found || f.Forward.Protocol == unix.IPPROTO_TCP && f.Forward.DstIP.String() == to.Addr().String() && f.Forward.DstPort == to.Port()
		}
		return err
	}))
	return found
}
