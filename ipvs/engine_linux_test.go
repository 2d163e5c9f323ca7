package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

const (
	webVIP = "198.51.100.1"
	dnsVIP = "198.51.100.2"
	pod1   = "192.0.2.1:8080"
	pod2   = "192.0.2.2:8080"
	pod3   = "192.0.2.3:8080"
)

func (n *node) mustSee(t *testing.T, want ...string) {
	t.Helper()
	if !slices.Equal(n.events, want) {
		t.Errorf("writes:\n%s\nwant:\n%s", strings.Join(n.events, "\n"), strings.Join(want, "\n"))
	}
}

// mustHold compares the virtual servers of the kernel, "address:port/PROTOCOL=real
// servers with weights".
func (n *node) mustHold(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for key, v := range n.kernel.virtuals {
		var reals []string
		for addr, weight := range v.reals {
			reals = append(reals, fmt.Sprintf("%v*%d", addr, weight))
		}
		slices.Sort(reals)
		got = append(got, fmt.Sprintf("%v=%s", key, strings.Join(reals, ",")))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("virtual servers:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func (n *node) mustBind(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for a := range n.device.here {
		got = append(got, a.String())
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("addresses of the device = %q, want %q", got, want)
	}
}

// TestRulesComeFirstAndAddressesBeforeVirtualServers: no packet for a VIP reaches a
// program of the node.
func TestRulesComeFirstAndAddressesBeforeVirtualServers(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	n.record()
	mustApply(t, e, full(service("web", webVIP, pod1)))
	n.mustSee(t, "rules", "waitForPackets", "add address "+webVIP, "put 198.51.100.1:80/TCP", "put real 198.51.100.1:80/TCP -> "+pod1+" weight 1", "rules")

	n.record()
	mustApply(t, e, removal("web"))
	n.mustSee(t, "rules", "put real 198.51.100.1:80/TCP -> "+pod1+" weight 0")
	n.mustBind(t, webVIP)

	n.record()
	deleteDrainedAfter(e, 0)
	n.mustSee(t, "delete real 198.51.100.1:80/TCP -> "+pod1, "delete 198.51.100.1:80/TCP", "remove address "+webVIP, "rules")
}

// A policy without endpoints cuts no connection of TCP or UDP while the endpoint is serving (PKT-80, PKT-81).
func TestAPolicyWithoutEndpointsCutsNoConnection(t *testing.T) {
	t.Parallel()
	for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
		n := newFakeNode()
		e := n.engine(t)
		open := service("web", webVIP, pod1)
		open.Protocol = protocol
		mustApply(t, e, full(open))
		key := keyOf(protocol, netip.MustParseAddrPort(webVIP+":80"))
		n.kernel.connect(key, netip.MustParseAddrPort(pod1))
		closed := *open
		closed.Frontends = slices.Clone(open.Frontends)
		closed.Frontends[0].Scope, closed.Frontends[0].Action = desired.ScopeLocal, desired.Drop
		mustApply(t, e, partial(&closed))
		deleteDrainedAfter(e, 24*time.Hour)
		n.mustHold(t, key.String()+"="+pod1+"*0")
		gone := closed
		gone.Cluster, gone.Serving = desired.Endpoints{}, desired.Endpoints{}
		mustApply(t, e, partial(&gone))
		deleteDrainedAfter(e, 48*time.Hour)
		n.mustHold(t)
		n.mustBind(t, webVIP)
	}
}

// TestCostOfAChange: replacing an endpoint takes two messages, adding one takes one, and
// memory does not depend on the number of Services.
func TestCostOfAChange(t *testing.T) {
	for _, services := range []int{10, 10_000} {
		t.Run(fmt.Sprint(services), func(t *testing.T) {
			n := newFakeNode()
			e := n.engine(t)
			mustApply(t, e, full(cluster(services)...))
			calls := func(s *desired.Service) int {
				before, device, rules := n.kernel.calls, n.device.calls, n.rules.updates
				mustApply(t, e, partial(s))
				if n.device.calls != device || n.rules.updates != rules+1 {
					t.Errorf("calls to device and rules = %d and %d, want 0 and 1", n.device.calls-device, n.rules.updates-rules)
				}
				return n.kernel.calls - before
			}
			name, vip := clusterName(services/2), clusterVIP(services/2)
			if got := calls(service(name, vip, pod1, pod3)); got != 2 {
				t.Errorf("messages for a replaced endpoint = %d, want 2", got)
			}
			if got := e.result.Report.Writes; got != 1000+2 {
				t.Errorf("reported writes = %d, want the 2, and 1000 of the rules", got)
			}
			if got := calls(service(name, vip, pod1, pod2, pod3)); got != 1 {
				t.Errorf("messages for an endpoint that is back = %d, want 1", got)
			}
			if got := calls(service(name, vip, pod1, pod2, pod3, "192.0.2.4:8080")); got != 1 {
				t.Errorf("messages for a new endpoint = %d, want 1", got)
			}
			if got := calls(service(name, vip, pod1, pod2, pod3, "192.0.2.4:8080")); got != 0 {
				t.Errorf("messages for no change = %d, want 0", got)
			}
			updates := []desired.Update{partial(service(name, vip, pod1, pod2)), partial(service(name, vip, pod1, pod3))}
			i := 0
			got := testing.AllocsPerRun(100, func() {
				mustApply(t, e, updates[i%2])
				i++
			})
			t.Logf("%v allocations", got)
			if got > 500 {
				t.Errorf("allocations for a replaced endpoint = %v, want 500 at most", got)
			}
		})
	}
}

func clusterName(i int) string { return fmt.Sprintf("svc-%05d", i) }
func clusterVIP(i int) string  { return fmt.Sprintf("10.96.%d.%d", i/250, i%250+1) }

// cluster returns n service ports with two endpoints each.
func cluster(n int) []*desired.Service {
	all := make([]*desired.Service, n)
	for i := range all {
		all[i] = service(clusterName(i), clusterVIP(i), pod1, pod2)
	}
	return all
}

// The same full Update again writes nothing, in the same process and in the next.
func TestTheSameFullUpdateAgainWritesNothing(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	u := full(service("web", webVIP, pod1, pod2), withFrontend(service("dns", dnsVIP, pod1), desired.NodePort, "", 30053))
	mustApply(t, e, u)
	for _, again := range []*engine{e, n.engine(t)} {
		n.record()
		mustApply(t, again, u)
		n.mustSee(t, "rules")
		if got := again.result.Report.Writes; got != 1000 {
			t.Errorf("reported writes = %d, want only the 1000 of the rules", got)
		}
	}
}

// Foreign objects stay after full syncs, repairs and Cleanup.
func TestForeignObjectsStay(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	foreign := map[serverKey]*virtual{
		tcpKey("203.0.113.1:80"):     {settings: settings{scheduler: "wlc"}, reals: map[netip.AddrPort]int{netip.MustParseAddrPort(pod1): 7}},
		tcpKey(nodeAddr + ":443"):    {settings: settings{scheduler: "sh"}, reals: map[netip.AddrPort]int{netip.MustParseAddrPort(pod2): 0}},
		udpKey(nodeAddr + ":30080"):  {settings: settings{scheduler: "sh"}, reals: map[netip.AddrPort]int{}},
		tcpKey("198.51.100.99:8443"): {settings: settings{scheduler: "rr"}, reals: map[netip.AddrPort]int{}},
	}
	maps.Copy(n.kernel.virtuals, foreign)
	n.device.elsewhere = append(n.device.elsewhere, netip.MustParseAddr("203.0.113.1"))
	e := n.engine(t)
	web := withFrontend(service("web", webVIP, pod1), desired.NodePort, "", 30080)
	check := func(when string) {
		for key, want := range foreign {
			got := n.kernel.virtuals[key]
			if got == nil || got.settings != want.settings || !maps.Equal(got.reals, want.reals) {
				t.Errorf("after %s foreign virtual server %v = %v, want %v", when, key, got, want)
			}
		}
	}
	mustApply(t, e, full(web))
	check("a full sync")
	mustApply(t, e, full())
	deleteDrainedAfter(e, 0)
	check("removal")
	mustApply(t, e, full(web))
	if err := e.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("Cleanup")
	if len(n.kernel.virtuals) != len(foreign) || n.device.exists || n.rules.cleanups != 1 {
		t.Errorf("Cleanup left %d virtual servers, the device: %t, rules cleaned %d times; want %d, false, 1",
			len(n.kernel.virtuals), n.device.exists, n.rules.cleanups, len(foreign))
	}
}

// TestANodesOwnAddressAsVIPKeepsItsOtherPorts: it is not on the device, and the rules do not
// refuse other ports, also if the node gets the address later.
func TestANodesOwnAddressAsVIPKeepsItsOtherPorts(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	const later = "203.0.113.9"
	s := withFrontend(withFrontend(service("web", webVIP, pod1), desired.ExternalIP, nodeAddr, 80), desired.LoadBalancer, later, 80)
	mustApply(t, e, full(s))
	n.mustBind(t, webVIP, later)
	for vip, want := range map[string]bool{webVIP: true, nodeAddr: false, later: true} {
		if got := n.rules.closes(vip); got != want {
			t.Errorf("the rules refuse other ports of %s: %v, want %v", vip, got, want)
		}
	}
	n.device.elsewhere = append(n.device.elsewhere, netip.MustParseAddr(later))
	mustApply(t, e, full(s))
	n.mustBind(t, webVIP)
	if n.rules.closes(later) {
		t.Error("the rules refuse other ports of an address that is the node's now")
	}
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1", nodeAddr+":80/TCP="+pod1+"*1", later+":80/TCP="+pod1+"*1")
}

// TestASuccessorRemovesWhatVanishedMeanwhile: addresses on the device and frontends in the
// rules belong to the instance, also if a predecessor wrote them.
func TestASuccessorRemovesWhatVanishedMeanwhile(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	mustApply(t, n.engine(t), full(
		withFrontend(service("web", webVIP, pod1), desired.NodePort, "", 30080),
		withFrontend(service("dns", dnsVIP, pod2), desired.ExternalIP, nodeAddr, 53)))
	e := n.engine(t)
	mustApply(t, e, full(service("web", webVIP, pod1)))
	deleteDrainedAfter(e, 0)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1")
	n.mustBind(t, webVIP)
}

// TestAFailedCallNeedsAFullUpdateAndLosesNothing makes each call of a full and of a partial
// update fail in turn, before its effect and after it.
func TestAFailedCallNeedsAFullUpdateAndLosesNothing(t *testing.T) {
	t.Parallel()
	before := full(withFrontend(service("web", webVIP, pod1, pod2), desired.NodePort, "", 30080), service("dns", dnsVIP, pod1))
	after := []*desired.Service{service("web", webVIP, pod2, pod3), service("api", "198.51.100.3", pod1)}
	change := removal("dns")
	change.Changes = append(change.Changes, desired.ChangesTo(after...)...)
	for what, u := range map[string]desired.Update{"full": full(after...), "partial": change} {
		for _, late := range []bool{false, true} {
			failures := 0
			for i := 0; ; i++ {
				n := newFakeNode()
				e := n.engine(t)
				mustApply(t, e, before)
				n.kernel.fault = fault{armed: true, after: i, late: late}
				_, err := e.Apply(t.Context(), u)
				if n.kernel.fault.armed {
					break // all have had their turn
				}
				failures++
				recovers(t, fmt.Sprintf("%s, kernel call %d, late %t", what, i, late), n, e, err, full(after...))
			}
			if failures < 5 {
				t.Errorf("%s: %d calls failed, want 5 at least", what, failures)
			}
		}
		for i := range 3 {
			n := newFakeNode()
			e := n.engine(t)
			mustApply(t, e, before)
			n.device.failAfter = i
			_, err := e.Apply(t.Context(), u)
			if n.device.failAfter >= 0 {
				break
			}
			recovers(t, fmt.Sprintf("%s, device call %d", what, i), n, e, err, full(after...))
		}
		n := newFakeNode()
		e := n.engine(t)
		mustApply(t, e, before)
		n.rules.err = errFault
		_, err := e.Apply(t.Context(), u)
		n.rules.err = nil
		recovers(t, what+", rules", n, e, err, full(after...))
	}
}

// recovers checks that a failure is returned, that a partial update is refused after it, and
// that a full one programs everything.
func recovers(t *testing.T, what string, n *node, e *engine, err error, u desired.Update) {
	t.Helper()
	if !errors.Is(err, errFault) {
		t.Errorf("%s: Apply = %v, want the fault, of no single service port", what, err)
	}
	if _, err := e.Apply(t.Context(), partial()); !errors.Is(err, proxier.ErrNotFull) {
		t.Errorf("%s: a partial Apply = %v, want that it is refused", what, err)
	}
	mustApply(t, e, u)
	deleteDrainedAfter(e, 0)
	n.mustHold(t, webVIP+":80/TCP="+pod2+"*1,"+pod3+"*1", "198.51.100.3:80/TCP="+pod1+"*1")
	n.mustBind(t, webVIP, "198.51.100.3")
	n.record()
	mustApply(t, e, u)
	n.mustSee(t, "rules")
	if t.Failed() {
		t.Fatalf("after: %s", what)
	}
}

// An old VIP is removed with the last of its connections, and not while another service port has it.
func TestAnOldVIPIsRemoved(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	shared := withFrontend(service("web", webVIP, pod1), desired.ExternalIP, "203.0.113.1", 81)
	mustApply(t, e, full(shared, withFrontend(service("dns", dnsVIP, pod1), desired.ExternalIP, "203.0.113.1", 53)))
	mustApply(t, e, partial(service("web", "198.51.100.9", pod1)))
	deleteDrainedAfter(e, 0)
	n.mustBind(t, "198.51.100.9", dnsVIP, "203.0.113.1")
	mustApply(t, e, partial(service("dns", dnsVIP, pod1)))
	deleteDrainedAfter(e, 0)
	n.mustBind(t, "198.51.100.9", dnsVIP)
}

// A deleted device is created again with its addresses.
func TestADeletedDeviceIsRecreated(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	u := full(service("web", webVIP, pod1))
	mustApply(t, e, u)
	n.device.exists, n.device.here = false, map[netip.Addr]bool{}
	mustApply(t, e, u)
	n.mustBind(t, webVIP)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1")
	if !n.device.exists {
		t.Error("the device is not there, want it back")
	}
}

// TestExcludedRangesStay: VIPs in them get no address and no virtual server, and existing
// ones stay.
func TestExcludedRangesStay(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	const excluded, stranger = "203.0.113.1", "203.0.113.2"
	n.device.here[netip.MustParseAddr(stranger)] = true
	n.kernel.virtuals[tcpKey(stranger+":80")] = &virtual{reals: map[netip.AddrPort]int{}}
	e := n.engine(t, func(c *Config) { c.ExcludeCIDRs = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")} })
	mustApply(t, e, full(withFrontend(service("web", webVIP, pod1), desired.ExternalIP, excluded, 80)))
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1", stranger+":80/TCP=")
	n.mustBind(t, webVIP, stranger)
}

// Node ports follow the node's addresses (NODE-04): a change is damage, and the repair writes the virtual servers.
func TestNodePortsFollowTheNodesAddresses(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	u := full(withFrontend(service("web", webVIP, pod1), desired.NodePort, "", 30080))
	const second = "192.0.2.251"
	if _, matters := e.isDamage(addrUpdate(second, otherLink, true)); matters {
		t.Error("an address matters before the first update, want not: that one is full")
	}
	mustApply(t, e, u)
	for _, c := range []struct {
		what    string
		change  netlinkx.AddrChange
		matters bool
	}{
		{"a new address", addrUpdate(second, otherLink, true), true},
		{"a known address again", addrUpdate(nodeAddr, otherLink, true), false},
		{"a known address goes", addrUpdate(nodeAddr, otherLink, false), true},
		{"an unknown address goes", addrUpdate(second, otherLink, false), false},
		{"our VIP comes", addrUpdate(webVIP, deviceLink, true), false},
		{"our VIP goes", addrUpdate(webVIP, deviceLink, false), true},
		{"a former VIP goes", addrUpdate(dnsVIP, deviceLink, false), false},
		{"a VIP becomes an address of the node", addrUpdate(webVIP, otherLink, true), true},
		{"the other family", addrUpdate("2001:db8::1", otherLink, true), false},
		{"loopback", addrUpdate("127.0.0.2", otherLink, true), false},
		{"link-local IPv4, which accepts node ports", addrUpdate("169.254.1.1", otherLink, true), true},
	} {
		if text, got := e.isDamage(c.change); got != c.matters {
			t.Errorf("%s matters = %t (%s), want %t", c.what, got, text, c.matters)
		}
	}
	if e.addressesChanged() {
		t.Error("addresses were missed, want none")
	}
	n.device.elsewhere = append(n.device.elsewhere, netip.MustParseAddr(second))
	if !e.addressesChanged() {
		t.Error("no addresses were missed, want the new one")
	}
	mustApply(t, e, u)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1", nodeAddr+":30080/TCP="+pod1+"*1", second+":30080/TCP="+pod1+"*1")
	n.device.elsewhere = []netip.Addr{netip.MustParseAddr(second)}
	mustApply(t, e, u)
	deleteDrainedAfter(e, 0)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1", second+":30080/TCP="+pod1+"*1")
}

func addrUpdate(addr string, link int, isNew bool) netlinkx.AddrChange {
	return netlinkx.AddrChange{Addr: netip.MustParseAddr(addr), Link: link, New: isNew}
}

// A VIP has precedence over a node port if it is an address of the node, in any order of creation. When the VIP is
// removed, the node port gets the virtual server.
func TestAVIPHasPrecedenceOverANodePort(t *testing.T) {
	t.Parallel()
	vip := withFrontend(service("vip", webVIP, pod1), desired.ExternalIP, nodeAddr, 30080)
	port := withFrontend(service("port", dnsVIP, pod2), desired.NodePort, "", 30080)
	clusterIPs := []string{webVIP + ":80/TCP=" + pod1 + "*1", dnsVIP + ":80/TCP=" + pod2 + "*1"}
	for what, u := range map[string]desired.Update{"VIP first": full(vip, port), "node port first": full(port, vip)} {
		t.Run(what, func(t *testing.T) {
			n := newFakeNode()
			e := n.engine(t)
			hold := func(pod string, others ...string) {
				t.Helper()
				deleteDrainedAfter(e, 0)
				n.mustHold(t, append(others, nodeAddr+":30080/TCP="+pod+"*1")...)
			}
			mustApply(t, e, u)
			hold(pod1, clusterIPs...)
			changed := *port
			changed.Cluster = desired.EndpointsOf(netip.MustParseAddrPort(pod3))
			changed.Serving = changed.Cluster
			mustApply(t, e, partial(&changed))
			mustApply(t, e, removal("vip"))
			hold(pod3, dnsVIP+":80/TCP="+pod3+"*1")
			mustApply(t, e, partial(vip))
			mustApply(t, e, removal("port"))
			hold(pod1, clusterIPs[0])
			mustApply(t, e, removal("vip"))
			deleteDrainedAfter(e, 0)
			n.mustHold(t)
		})
	}
}

// A failed cleanup keeps the rules, because the next cleanup needs them to recognize virtual servers.
func TestAFailedCleanupKeepsTheRules(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	mustApply(t, e, full(withFrontend(service("web", webVIP, pod1), desired.NodePort, "", 30080)))
	n.kernel.fault = fault{armed: true, after: 1}
	if err := e.Cleanup(t.Context()); !errors.Is(err, errFault) || n.rules.cleanups != 0 {
		t.Errorf("Cleanup = %v, rules cleaned %d times; want the fault, and 0", err, n.rules.cleanups)
	}
	if err := n.engine(t).Cleanup(t.Context()); err != nil {
		t.Error(err)
	}
	n.mustHold(t)
}

// A failed start closes everything and returns the error.
func TestAFailedStartClosesEverything(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	for what, breaks := range map[string]func(g *system){
		"kernel":   func(g *system) { g.kernel = func() (kernel, error) { return nil, errFault } },
		"device":   func(g *system) { g.device = func() (vipDevice, error) { return nil, errFault } },
		"settings": func(g *system) { g.check = func(func(string)) error { return errFault } },
	} {
		e := n.engine(t)
		works := e.system
		breaks(&e.system)
		if _, err := e.Apply(t.Context(), full()); !errors.Is(err, errFault) || e.kernel != nil || e.device != nil {
			t.Errorf("%s: Apply = %v, kernel %v, device %v; want the fault, and none open", what, err, e.kernel, e.device)
		}
		e.deleteDrained(t.Context())
		e.system = works
		mustApply(t, e, full())
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestDumpPrintsVirtualServersAndRules(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	var empty, b strings.Builder
	if err := e.Dump(t.Context(), &empty); err != nil || empty.String() != "the rules\n" {
		t.Errorf("Dump at first = %q, %v; want only the rules", empty.String(), err)
	}
	s := service("web", webVIP, pod1, pod2)
	s.Affinity, s.Port = time.Hour, &changetracker.ServicePort{Balancing: changetracker.SourcePortHash}
	mustApply(t, e, full(s))
	const want = "198.51.100.1:80/TCP mh persistent 1h0m0s mh-fallback mh-port\n  -> 192.0.2.1:8080 weight 1\n  -> 192.0.2.2:8080 weight 1\nthe rules\n"
	if err := e.Dump(t.Context(), &b); err != nil || b.String() != want {
		t.Errorf("Dump = %q, %v; want %q", b.String(), err, want)
	}
	if text, err := e.Plan(full(s)); err != nil || !strings.HasPrefix(want, strings.Split(text, "\n")[0]) {
		t.Errorf("Plan = %q, %v; want what Dump prints", text, err)
	}
}

// TestAFirstUpdateFailsBesideAChangeOfMode: each access to the device and to IPVS that comes before the VIPs of a change of
// mode are taken back fails in turn.
func TestAFirstUpdateFailsBesideAChangeOfMode(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	fail := map[string]func(n *node, after int){
		"device": func(n *node, after int) { n.device.failAfter = after },
		"kernel": func(n *node, after int) { n.kernel.fault = fault{after: after, armed: true} },
	}
	for what, arm := range fail {
		for after := range 2 {
			n := newFakeNode()
			e := n.engine(t, func(c *Config) { c.NetNS = ns.Path() })
			e.system.left = func() (*left, error) {
				l, err := openLeft(&e.config, v1.IPv4Protocol)
				if err == nil {
					l.vips.keys[netip.MustParseAddr(dnsVIP)] = true
				}
				return l, err
			}
			arm(n, after)
			if _, err := e.Apply(t.Context(), full(service("web", webVIP, pod1))); !errors.Is(err, errFault) {
				t.Errorf("%s, call %d fails: Apply = %v, want %v", what, after, err, errFault)
			}
			netnstest.Check(t, e.Close())
		}
	}
}
