//go:build vm

package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// fast returns an engine with a fast path.
func (w *world) fast(tb testing.TB, ns *netns.NS, change ...func(*Config)) *Engine {
	tb.Helper()
	config := Config{Config: proxier.Config{NetNS: ns.Path()}, FastPathAfter: 20}
	for _, c := range change {
		c(&config)
	}
	e, err := NewEngine(config, w.family, proxier.Deps{})
	netnstest.Check(tb, err)
	tb.Cleanup(func() { netnstest.Check(tb, e.Close()) })
	return e
}

// fastModel is verified, in which the first service port asks for the fast path.
func fastModel(w *world) model {
	m := verified(w)
	m[name(0)].Port = &changetracker.ServicePort{FastPath: true}
	return m
}

// cabled returns a network namespace with these devices.
func cabled(t *testing.T, names ...string) *netns.NS {
	t.Helper()
	ns := netnstest.New(t)
	for _, name := range names {
		plugIn(t, ns, name)
	}
	return ns
}

// plugIn adds a device. It goes when the returned namespace is closed.
func plugIn(t *testing.T, ns *netns.NS, name string) (other *netns.NS) {
	t.Helper()
	other = netnstest.New(t)
	netnstest.Check(t, netns.Connect(netns.Plug{NS: ns, Link: name}, netns.Plug{NS: other, Link: "eth0"}))
	return other
}

// devices are those of the flowtable in the kernel.
func devices(t *testing.T, e *Engine) string {
	t.Helper()
	k, err := nft.Dial(e.config.NetNS)
	netnstest.Check(t, err)
	_, err = e.generationFrom(t.Context(), k)
	netnstest.Check(t, err)
	flows, err := e.listFlowtables(t.Context(), k)
	netnstest.Check(t, err)
	netnstest.Check(t, k.Close())
	return strings.Join(flows[flowtableOfOurs].devices, " ")
}

// TestTheFastPathIsPartOfTheTable: rules are those that nft prints, a restart writes nothing, each
// damage is found and repaired, a configuration without it removes it, and Cleanup too.
func TestTheFastPathIsPartOfTheTable(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := cabled(t, "eth0", "pod1")
		e, m := w.fast(t, ns), fastModel(w)
		mustApply(t, e, m.full(w))
		if got := devices(t, e); got != "eth0 pod1" || e.fastAfter() == 0 {
			t.Fatalf("devices %q, fast path after %d packets; want eth0 and pod1, after 20", got, e.fastAfter())
		}
		compareRules(t, e, ns, map[string]bool{})
		mustWriteNothing(t, e, m.full(w), "again")
		mustWriteNothing(t, w.fast(t, ns), m.full(w), "a restart")
		vip := fmt.Sprintf("%s . tcp . 80", w.addr(96, 0))
		for what, p := range map[string]plant{
			"VIP deleted":       {"delete element IP serviceplane fast-vips { VIP . tcp . 80 }", []string{"missing element " + vip + " of set fast-vips*"}},
			"VIP of others":     {"add element IP serviceplane fast-vips { STICKY . tcp . 80 }", []string{"unexpected element STICKY . tcp . 80 of set fast-vips"}},
			"node port deleted": {"delete element IP serviceplane fast-nodeports { tcp . 30000 . POD1 . 8080 }", []string{"missing element tcp . 30000 . POD1 . 8080 of set fast-nodeports*"}},
			"rules deleted":     {"flush chain IP serviceplane fast-path", []string{"missing rule 1 of chain fast-path*", "missing rule 2 of chain fast-path*"}},
			"all flows":         {"flush chain IP serviceplane fast-path; add rule IP serviceplane fast-path flow add @fast-path", []string{"different rule 1 of chain fast-path*", "missing rule 2 of chain fast-path*"}},
			"device deleted":    {"delete flowtable IP serviceplane fast-path { hook ingress priority 0; devices = { pod1 }; }", []string{"missing device pod1 of flowtable fast-path*"}},
			"device added":      {"add flowtable IP serviceplane fast-path { hook ingress priority 0; devices = { lo }; counter; }", []string{"unexpected device lo of flowtable fast-path*"}},
			"flowtable added":   {"add flowtable IP serviceplane foreign { hook ingress priority 5; devices = { lo }; }", []string{"unexpected flowtable foreign*"}},
			"flowtable deleted": {
				"delete chain IP serviceplane fast-path; delete flowtable IP serviceplane fast-path",
				[]string{"missing chain fast-path*", "missing flowtable fast-path*"},
			},
			"another priority": {
				"delete chain IP serviceplane fast-path; delete flowtable IP serviceplane fast-path; add flowtable IP serviceplane fast-path { hook ingress priority 7; devices = { eth0, pod1 }; counter; }",
				[]string{"different flowtable fast-path*", "missing chain fast-path*"},
			},
		} {
			t.Run(what, func(t *testing.T) { p.in(w).verify(t, ns, e, m.full(w)) })
		}
		plain := w.engine(t, ns)
		mustApply(t, plain, m.full(w))
		if listing := mustList(t, ns); strings.Contains(listing, "flow") {
			t.Errorf("without a fast path the table has\n%s", listing)
		}
		mustWriteNothing(t, plain, m.full(w), "without a fast path")
		mustApply(t, e, m.full(w))
		mustWriteNothing(t, w.fast(t, ns), m.full(w), "with a fast path again")
		netnstest.Check(t, e.Cleanup(t.Context()))
		if listing := mustList(t, ns); listing != "" {
			t.Errorf("after Cleanup the kernel has\n%s", listing)
		}
	})
}

// TestServicePortsAskForTheFastPath: elements come and go with a service port's wish, and with its
// endpoints.
func TestServicePortsAskForTheFastPath(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := cabled(t, "eth0")
		e, m := w.fast(t, ns), fastModel(w)
		mustApply(t, e, m.full(w))
		elements := func() int { return strings.Count(mustListOf(t, ns, w, setFastNodePorts), "tcp . 30000 .") }
		if n := elements(); n != 3 { // of both scopes
			t.Errorf("%d endpoints of the node port, want 3", n)
		}
		web := *m[name(0)]
		web.Cluster = desired.EndpointsOf(web.Cluster.Slice()[:2]...)
		change := func(s *desired.Service) {
			m[s.Name] = s
			mustApply(t, e, desired.Update{Family: w.family, Globals: w.globals(), Changes: desired.ChangesTo(s)})
		}
		change(&web)
		if n := elements(); n != 2 {
			t.Errorf("%d endpoints of the node port, want 2", n)
		}
		other := web
		other.Port = &changetracker.ServicePort{}
		change(&other)
		if listing := mustListOf(t, ns, w, setFastVIPs) + mustListOf(t, ns, w, setFastNodePorts); strings.Contains(listing, "elements") {
			t.Errorf("it does not ask: the sets have\n%s", listing)
		}
		change(&web)
		if n := elements(); n != 2 {
			t.Errorf("%d endpoints of the node port after it asks again, want 2", n)
		}
		mustWriteNothing(t, e, m.full(w), "at the end")
	})
}

func mustListOf(t *testing.T, ns *netns.NS, w *world, id setID) string {
	t.Helper()
	return nftOutput(t, ns, "list", "set", ipKeyword(w.family), "serviceplane", setName(id))
}

// TestDevicesOfTheFastPathFollowLinks: devices come and go without an update. Another program that
// takes one away is reported.
func TestDevicesOfTheFastPathFollowLinks(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := cabled(t, "eth0", "other0")
		e := w.fast(t, ns, func(c *Config) {
			c.FastPathDevice = func(name string) bool { return !strings.HasPrefix(name, "other") }
		})
		m := fastModel(w)
		ctx, cancel := context.WithCancel(t.Context())
		damaged, done := make(chan proxier.Damage, 100), make(chan error, 1)
		go func() { done <- e.Watch(ctx, func(d proxier.Damage) { damaged <- d }) }()
		t.Cleanup(func() {
			cancel()
			netnstest.Check(t, <-done)
		})
		mustApply(t, e, m.full(w))
		var ends []*netns.NS
		want := []string{"eth0"}
		for n := range 5 {
			ends = append(ends, plugIn(t, ns, fmt.Sprintf("pod%d", n)))
			want = append(want, fmt.Sprintf("pod%d", n))
		}
		plugIn(t, ns, "other1")
		poll.Until(t, "new devices take part", func() bool { return devices(t, e) == strings.Join(want, " ") })
		netnstest.Check(t, ends[1].Close())
		want = slices.DeleteFunc(want, func(d string) bool { return d == "pod1" })
		poll.Until(t, "a device that went is gone", func() bool { return devices(t, e) == strings.Join(want, " ") })
		mustWriteNothing(t, w.fast(t, ns, func(c *Config) { c.FastPathDevice = e.config.FastPathDevice }), m.full(w), "a restart")
		for len(damaged) > 0 {
			if d := <-damaged; d != (proxier.Damage{}) { // the listener may start after the first update
				t.Errorf("own changes of devices are reported as %v", d)
			}
		}
		mustNFT(t, ns, "delete flowtable "+ipKeyword(w.family)+" serviceplane fast-path { hook ingress priority 0; devices = { pod2 }; }")
		if d := <-damaged; !strings.Contains(d.Object, "flowtable fast-path") {
			t.Errorf("damage %v, want one of the flowtable", d)
		}
		mustApply(t, e, m.full(w))
		if got := devices(t, e); got != strings.Join(want, " ") {
			t.Errorf("devices %q after the repair, want %q", got, want)
		}
	})
}

// The fast path has more devices than one message may name.
func TestManyDevices(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		const n = devicesOfMessage + 72 // longer than the first page of a dump too
		ns := netnstest.New(t)
		netnstest.Check(t, ns.Do(func() error { return addDummies(n) }))
		e, m := w.fast(t, ns), fastModel(w)
		mustApply(t, e, m.full(w))
		if got := len(strings.Fields(devices(t, e))); got != n {
			t.Errorf("%d devices, want %d; once more: %v", got, n, e.followDevices(t.Context(), e.kernel))
		}
		netnstest.Check(t, ns.Do(func() error { return deleteDummies(n - 1) }))
		mustApply(t, e, m.full(w))
		if got := devices(t, e); got != fmt.Sprintf("dummy%010d", n-1) {
			t.Errorf("devices %q, want the last one", got)
		}
	})
}

func addDummies(n int) error {
	for i := range n {
		link := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("dummy%010d", i)}}
		var err error // the module may be loading for the other family
		if poll.Soon(func() bool { err = netlink.LinkAdd(link); return !errors.Is(err, unix.EOPNOTSUPP) }); err != nil {
			return err
		}
	}
	return nil
}

func deleteDummies(n int) error {
	for i := range n {
		if err := netlink.LinkDel(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("dummy%010d", i)}}); err != nil {
			return err
		}
	}
	return nil
}
