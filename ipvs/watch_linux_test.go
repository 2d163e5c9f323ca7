package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// A watch reports addresses and deletes drained real servers, in a network namespace of its own.
func TestWatchReportsAddressesAndDeletesDrained(t *testing.T) {
	ns := netnstest.New(t)
	n := newFakeNode()
	e := n.engine(t, func(c *Config) { c.NetNS = ns.Path() })
	mustApply(t, e, full(service("web", webVIP, pod1)))
	mustApply(t, e, removal("web"))
	n.device.elsewhere = append(n.device.elsewhere, netip.MustParseAddr("192.0.2.77")) // added before Watch subscribed
	damages := make(chan proxier.Damage, 10)
	poll.Background(t, func(ctx context.Context) error { return e.Watch(ctx, func(d proxier.Damage) { damages <- d }) })
	awaitDamage(t, damages, "addresses of the node")
	if err := ns.AddAddrs("lo", netip.MustParsePrefix("203.0.113.5/32")); err != nil {
		t.Fatal(err)
	}
	awaitDamage(t, damages, "address 203.0.113.5 of the node")
	poll.Until(t, "Watch deletes drained real servers", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(n.kernel.virtuals) == 0
	})
}

// A watch ends with the watch of the rules, and with the error of that watch.
func TestWatchEndsWithTheWatchOfTheRules(t *testing.T) {
	ns := netnstest.New(t)
	n := newFakeNode()
	e := n.engine(t, func(c *Config) { c.NetNS = ns.Path() })
	n.rules.watch = func(context.Context) error { return errFault }
	if err := e.Watch(t.Context(), func(proxier.Damage) {}); !errors.Is(err, errFault) {
		t.Errorf("Watch = %v, want the error of the rules", err)
	}
}

// A watch asks for a full sync after a failure to delete drained real servers.
func TestWatchAsksForAFullSyncAfterAFailure(t *testing.T) {
	ns := netnstest.New(t)
	n := newFakeNode()
	e := n.engine(t, func(c *Config) { c.NetNS = ns.Path() })
	mustApply(t, e, full(service("web", webVIP, pod1)))
	mustApply(t, e, removal("web"))
	n.rules.err = errFault
	damages := make(chan proxier.Damage, 10)
	poll.Background(t, func(ctx context.Context) error { return e.Watch(ctx, func(d proxier.Damage) { damages <- d }) })
	awaitDamage(t, damages, "")
}

// Damage is reported once, also beside a change by the engine. Deleting drained servers is no damage.
func TestDamageIsReportedOnce(t *testing.T) {
	t.Parallel()
	web := tcpKey(webVIP + ":80")
	server, reals := "virtual server "+webVIP+":80/TCP", "real servers of virtual server "+webVIP+":80/TCP"
	for what, c := range map[string]struct {
		want   string
		damage func(k *fakeKernel)
	}{
		"virtual server deleted": {server, func(k *fakeKernel) { delete(k.virtuals, web) }},
		"real server deleted":    {reals, func(k *fakeKernel) { delete(k.virtuals[web].reals, netip.MustParseAddrPort(pod1)) }},
		"real server added":      {reals, func(k *fakeKernel) { k.virtuals[web].reals[netip.MustParseAddrPort(pod2)] = 1 }},
		"weight changed":         {reals, func(k *fakeKernel) { k.virtuals[web].reals[netip.MustParseAddrPort(pod1)] = 0 }},
		"all flushed":            {server, func(k *fakeKernel) { clear(k.virtuals) }},
		"scheduler changed":      {server, func(k *fakeKernel) { k.virtuals[web].scheduler = "lc" }},
		"made persistent":        {server, func(k *fakeKernel) { k.virtuals[web].flags |= flagPersistent }},
	} {
		t.Run(what, func(t *testing.T) {
			n := newFakeNode()
			e := n.engine(t)
			mustApply(t, e, full(service("web", webVIP, pod1), service("dns", dnsVIP, pod2)))
			mustApply(t, e, removal("dns"))
			deleteDrainedAfter(e, 0)
			if text, _ := e.checkServers(); text != "" {
				t.Errorf("checkServers = %s, want nothing", text)
			}
			c.damage(n.kernel)
			mustApply(t, e, partial(service("dns", dnsVIP, pod2)))
			if text, _ := e.checkServers(); text != c.want {
				t.Errorf("checkServers = %q, want %q", text, c.want)
			}
			if text, _ := e.checkServers(); text != "" {
				t.Errorf("checkServers = %s again, want it once", text)
			}
			mustApply(t, e, full(service("web", webVIP, pod1)))
			if text, _ := e.checkServers(); text != "" {
				t.Errorf("checkServers = %s after the repair, want nothing", text)
			}
		})
	}
}

// TestAnIncompleteListIsNoDamage: while the kernel lists all virtual servers, the other IP
// family may write, and then the list is incomplete.
func TestAnIncompleteListIsNoDamage(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	mustApply(t, e, full(service("web", webVIP, pod1), service("dns", dnsVIP, pod2)))
	n.kernel.hidden = map[serverKey]bool{tcpKey(webVIP + ":80"): true}
	if text, _ := e.checkServers(); text != "" {
		t.Errorf("checkServers = %s, want nothing", text)
	}
	delete(n.kernel.virtuals[tcpKey(dnsVIP+":80")].reals, netip.MustParseAddrPort(pod2))
	if text, _ := e.checkServers(); !strings.Contains(text, dnsVIP) {
		t.Errorf("checkServers = %q, want that of dns", text)
	}
}

func awaitDamage(t *testing.T, damages <-chan proxier.Damage, want string) {
	t.Helper()
	deadline := time.After(poll.Timeout)
	for {
		select {
		case d := <-damages:
			if d.Object == want {
				return
			}
		case <-deadline:
			t.Fatalf("no damage reported, want %q", want)
		}
	}
}
