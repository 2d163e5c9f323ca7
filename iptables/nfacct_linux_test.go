package iptables

import (
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// ask connects to an address from the node itself.
func (w *world) ask(to string) error {
	_, err := netns.Ask(w.t.Context(), w.ns, "tcp", netip.MustParseAddrPort(to), netns.AskOptions{})
	return err
}

// knowsNFAcct reports whether the kernel and the program take a rule with a counter.
func (w *world) knowsNFAcct() bool {
	return acct{w.ns.Path()}.ensure("probe") == nil && w.try("-A", "OUTPUT", "-d", "192.0.2.99", "-m", "nfacct", "--nfacct-name", "probe") == nil
}

// The kernel counts connections to localhost node ports and no others. The count survives the engine, and ends with
// a clean-up (MET-23).
func TestConnectionsToLocalhostNodePortsAreCounted(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		netnstest.Serve(t, w.ns, "pod", 8080)
		w.run("ip", "addr", "add", "192.0.2.10/32", "dev", "lo")
		web := func(p *proxier.Proxier) {
			p.OnServiceAdd(proxiertest.Service("test", "web", proxiertest.ClusterIPs("10.96.0.1"), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080)))
			p.OnEndpointSliceAdd(slice("web", discovery.AddressTypeIPv4, "192.0.2.10"))
		}
		counters := NewCounters(w.config())
		if _, ok := counters.LocalhostNodePorts(); ok {
			t.Fatal("connections are counted before the engine starts")
		}
		_, stop := w.startWith(web)
		expect := func(want uint64) {
			t.Helper()
			if got, ok := counters.LocalhostNodePorts(); !ok || got != want {
				t.Errorf("%d connections to localhost node ports are counted (%t), want %d\n%s", got, ok, want, w.save())
			}
		}
		if !w.knowsNFAcct() {
			if _, ok := counters.LocalhostNodePorts(); ok {
				t.Error("connections are counted without nfacct")
			}
			return
		}
		expect(0)
		for _, to := range []string{"127.0.0.1:30080", "127.0.0.2:30080", "192.0.2.10:30080", "127.0.0.1:8080"} {
			if err := w.ask(to); err != nil {
				t.Errorf("connect to %s: %v", to, err)
			}
		}
		expect(2)
		if _, ok := counters.Invalid(); !ok {
			t.Error("packets in state INVALID are not counted")
		}
		stop()
		p, stop := w.startWith(web)
		expect(2)
		for family, r := range lastWrites(p) { // the kernel's rules are those of the plan
			if r.Apply.Bytes > 0 {
				t.Errorf("%s: the next engine writes %d bytes, want none", family, r.Apply.Bytes)
			}
		}
		stop()
		if err := p.Cleanup(t.Context()); err != nil {
			t.Errorf("Cleanup = %v, want nil", err)
		}
		for name, read := range map[string]func() (uint64, bool){"localhost": counters.LocalhostNodePorts, "invalid": counters.Invalid} {
			if _, ok := read(); ok {
				t.Errorf("counter %s is there after a clean-up", name)
			}
		}
	})
}
