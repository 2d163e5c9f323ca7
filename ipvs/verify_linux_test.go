package ipvs

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

func at(addr string) serverKey { return keyOf(desired.TCP, netip.MustParseAddrPort(addr)) }

func real(addr string) netip.AddrPort { return netip.MustParseAddrPort(addr) }

func addrOnly(addr string) netip.Addr { return netip.MustParseAddr(addr) }

// plant is a change by another program, and the differences that Verify must find: problem,
// Service or "-", and object.
type plant struct {
	change func(n *node)
	want   []string
}

const (
	web, nodeWeb = "10.96.0.1:80", nodeAddr + ":30080"
	podA, podB   = "10.244.0.1:8080", "10.244.0.2:8080"
	stranger     = "10.244.9.9:8080"
	onWeb        = " of virtual server " + web + "/TCP"
)

func plants() map[string]plant {
	server := func(key string, change func(v *virtual)) func(*node) {
		return func(n *node) { change(n.kernel.virtuals[at(key)]) }
	}
	add := func(key serverKey, s settings, reals map[netip.AddrPort]int) func(*node) {
		return func(n *node) { n.kernel.virtuals[key] = &virtual{settings: s, reals: reals} }
	}
	rr := settings{scheduler: "rr"}
	udp := keyOf(desired.UDP, netip.MustParseAddrPort("10.96.0.1:99"))
	return map[string]plant{
		"virtual server deleted":  {func(n *node) { delete(n.kernel.virtuals, at(web)) }, []string{"missing web virtual server " + web + "/TCP"}},
		"node port deleted":       {func(n *node) { delete(n.kernel.virtuals, at(nodeWeb)) }, []string{"missing web virtual server " + nodeWeb + "/TCP"}},
		"all deleted":             {func(n *node) { clear(n.kernel.virtuals) }, []string{"missing least virtual server 10.96.0.3:80/TCP", "missing sticky virtual server 10.96.0.2:80/TCP", "missing web virtual server " + web + "/TCP", "missing web virtual server " + nodeWeb + "/TCP"}},
		"virtual server added":    {add(at("10.96.0.1:81"), rr, map[netip.AddrPort]int{real(podA): 1}), []string{"unexpected - virtual server 10.96.0.1:81/TCP"}},
		"empty virtual server":    {add(at("10.96.0.1:81"), rr, nil), []string{"unexpected - virtual server 10.96.0.1:81/TCP"}},
		"UDP without connections": {add(udp, rr, map[netip.AddrPort]int{real(podA): 0}), []string{"unexpected - virtual server 10.96.0.1:99/UDP"}},
		"draining virtual server": {add(at("10.96.0.1:81"), rr, map[netip.AddrPort]int{real(podA): 0}), nil},
		"foreign virtual server":  {add(at("203.0.113.1:80"), rr, map[netip.AddrPort]int{real(podA): 1}), nil},
		"foreign at the node":     {add(at(nodeAddr+":9"), rr, map[netip.AddrPort]int{real(podA): 1}), nil},
		"another scheduler":       {server(web, func(v *virtual) { v.scheduler = "lc" }), []string{"different web virtual server " + web + "/TCP"}},
		"weighted scheduler":      {server(web, func(v *virtual) { v.scheduler = "wrr" }), nil},
		"scheduler of a policy":   {server("10.96.0.3:80", func(v *virtual) { v.scheduler = "rr" }), []string{"different least virtual server 10.96.0.3:80/TCP"}},
		"flag added":              {server(web, func(v *virtual) { v.flags |= flagPersistent }), []string{"different web virtual server " + web + "/TCP"}},
		"flag deleted":            {server("10.96.0.2:80", func(v *virtual) { v.flags = 0 }), []string{"different sticky virtual server 10.96.0.2:80/TCP"}},
		"timeout changed":         {server("10.96.0.2:80", func(v *virtual) { v.timeout = time.Minute }), []string{"different sticky virtual server 10.96.0.2:80/TCP"}},
		"real server deleted":     {server(web, func(v *virtual) { delete(v.reals, real(podA)) }), []string{"missing web real server " + podA + onWeb}},
		"real servers deleted":    {server(web, func(v *virtual) { clear(v.reals) }), []string{"missing web real server " + podA + onWeb, "missing web real server " + podB + onWeb}},
		"real server added":       {server(web, func(v *virtual) { v.reals[real(stranger)] = 1 }), []string{"unexpected web real server " + stranger + onWeb}},
		"draining real server":    {server(web, func(v *virtual) { v.reals[real(stranger)] = 0 }), nil},
		"weight changed":          {server(web, func(v *virtual) { v.reals[real(podA)] = 7 }), []string{"different web real server " + podA + onWeb}},
		"endpoint gets nothing":   {server(web, func(v *virtual) { v.reals[real(podA)] = 0 }), []string{"different web real server " + podA + onWeb}},
		"at the node port":        {server(nodeWeb, func(v *virtual) { v.reals[real(podB)] = 9 }), []string{"different web real server " + podB + " of virtual server " + nodeWeb + "/TCP"}},
		"address deleted":         {func(n *node) { delete(n.device.here, addrOnly("10.96.0.1")) }, []string{"missing web address 10.96.0.1 of device serviceplane0"}},
		"all addresses deleted":   {func(n *node) { clear(n.device.here) }, []string{"missing least address 10.96.0.3 of device serviceplane0", "missing sticky address 10.96.0.2 of device serviceplane0", "missing web address 10.96.0.1 of device serviceplane0"}},
		"address added":           {func(n *node) { n.device.here[addrOnly("10.96.9.9")] = true }, []string{"unexpected - address 10.96.9.9 of device serviceplane0"}},
		"rules of one Service":    {func(n *node) { delete(n.rules.services, portName("web")) }, []string{"different web rules"}},
		"refused by the rules":    {func(n *node) { n.rules.behind.Refused = map[desired.Key]bool{{Port: 1}: true} }, []string{"different web rules"}},
		"nothing":                 {func(*node) {}, nil},
		"a draining server's address": {func(n *node) {
			n.device.here[addrOnly("10.96.9.9")] = true
			add(at("10.96.9.9:80"), rr, map[netip.AddrPort]int{real(podA): 0})(n)
		}, nil},
	}
}

// verified are Services that Verify compares.
func verified() desired.Update {
	sticky, least := service("sticky", "10.96.0.2", podA), service("least", "10.96.0.3", podA)
	sticky.Affinity = time.Hour
	least.Port = &changetracker.ServicePort{Balancing: changetracker.LeastConnections}
	return full(withFrontend(service("web", "10.96.0.1", podA, podB), desired.NodePort, "", 30080), sticky, least)
}

// TestVerifyNamesEachDamage: it names what was changed and nothing else, and writes nothing.
func TestVerifyNamesEachDamage(t *testing.T) {
	t.Parallel()
	for what, p := range plants() {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := newFakeNode()
			e := n.engine(t)
			mustApply(t, e, verified())
			mustFind(t, e, verified(), "at first")
			p.change(n)
			n.record()
			before, here := text(n.kernel.virtuals), maps.Clone(n.device.here)
			mustFind(t, e, verified(), what, p.want...)
			if len(n.events) > 0 || text(n.kernel.virtuals) != before || !maps.Equal(n.device.here, here) {
				t.Errorf("Verify has written %v", n.events)
			}
			mustApply(t, e, verified())
			mustFind(t, e, verified(), "after the repair")
		})
	}
}

func mustFind(t *testing.T, e *engine, u desired.Update, when string, want ...string) {
	t.Helper()
	report, err := e.Verify(t.Context(), u)
	if err != nil {
		t.Fatalf("verify: %v", err)
	}
	var got []string
	for _, d := range report.Differences {
		service := d.Service.Name
		if service == "" {
			service = "-"
		}
		got = append(got, strings.Join([]string{d.Problem, service, d.Object}, " "))
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("%s: found %q, want %q", when, got, want)
	}
}

// Verify accepts the scheduler that the kernel has in place of one that it lacks, and no other one.
func TestVerifyAcceptsWhatTheKernelHasInstead(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	n.kernel.missing["lc"] = &proxier.UnsupportedError{Feature: "scheduler lc", Err: unix.ENOENT}
	e := n.engine(t)
	if result, err := e.Apply(t.Context(), verified()); err != nil || len(result.Failed) != 1 {
		t.Fatalf("Apply = %v, %v, want one service port that failed", result.Failed, err)
	}
	mustFind(t, e, verified(), "with the scheduler instead")
	n.kernel.virtuals[at("10.96.0.3:80")].scheduler = "sed"
	mustFind(t, e, verified(), "with another one", "different least virtual server 10.96.0.3:80/TCP")
}

// Verify wants no server without endpoints, if a traffic policy excludes all that serve.
func TestVerifyWantsNoServerWithoutEndpoints(t *testing.T) {
	t.Parallel()
	e := newFakeNode().engine(t)
	s := service("web", "10.96.0.1", podA)
	s.Frontends[0].Scope, s.Frontends[0].Action = desired.ScopeLocal, desired.Drop
	mustApply(t, e, full(s))
	if report, err := e.Verify(t.Context(), full(s)); err != nil || len(report.Differences) > 0 {
		t.Errorf("Verify = %v, %v, want no difference", report.Differences, err)
	}
}

// Verify of a new engine reads the kernel, and writes no settings.
func TestVerifyOfAnEngineThatWasClosed(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	mustApply(t, n.engine(t), verified())
	n.record()
	mustFind(t, n.engine(t), verified(), "a new process")
	if len(n.events) > 0 {
		t.Errorf("Verify has written %v", n.events)
	}
}
