package nftables

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestAKernelWithoutFlowtables: Services work without the fast path, the engine says so, and the
// log has one line about it.
func TestAKernelWithoutFlowtables(t *testing.T) {
	t.Parallel()
	w := &world{rand: rand.New(rand.NewPCG(1, 0)), family: v1.IPv4Protocol}
	ns, m := netnstest.New(t), verified(w)
	core, logs := observer.New(zap.WarnLevel)
	e, err := NewEngine(Config{Config: proxier.Config{NetNS: ns.Path()}, FastPathAfter: 20}, w.family, proxier.Deps{Logger: zap.New(core)})
	netnstest.Check(t, err)
	t.Cleanup(func() { netnstest.Check(t, e.Close()) })
	e.lack("flow_offload")
	web := m[name(0)]
	web.Port = &changetracker.ServicePort{FastPath: true}
	if !e.Traits(web).TakesFastPath(web) {
		t.Error("there is no fast path before the kernel was asked")
	}
	for range 2 {
		mustApply(t, e, m.full(w))
		if e.Traits(web).TakesFastPath(web) {
			t.Error("a service port takes the fast path")
		}
	}
	mustWriteNothing(t, e, m.full(w), "again")
	mustMatch(t, e, m)
	lines := logs.FilterMessageSnippet("no flowtables").All()
	var lacks *proxier.UnsupportedError
	if len(lines) != 1 || logs.Len() != 1 {
		t.Fatalf("log %v, want one line about flowtables", logs.All())
	}
	for _, field := range lines[0].Context {
		if err, ok := field.Interface.(error); ok && errors.As(err, &lacks) && strings.Contains(lacks.Hint, "CONFIG_NF_FLOW_TABLE_INET") {
			return
		}
	}
	t.Errorf("log %v, want an UnsupportedError", lines[0].Context)
}

// The plan has the fast path, without a kernel.
func TestThePlanHasTheFastPath(t *testing.T) {
	w := &world{rand: rand.New(rand.NewPCG(1, 0)), family: v1.IPv4Protocol}
	m := verified(w)
	m[name(0)].Port = &changetracker.ServicePort{FastPath: true}
	rules := []string{
		"flowtable fast-path {", "type filter hook forward priority 200; policy accept;",
		"ct state established ct status dnat ct packets > 7 ct original ip daddr . meta l4proto . ct original proto-dst @fast-vips flow add @fast-path",
		"ct state established ct status dnat ct packets > 7 meta l4proto . ct original proto-dst . ct reply ip saddr . ct reply proto-src @fast-nodeports flow add @fast-path",
	}
	elements := []string{"\t\ttcp . 30000 . 10.244.0.1 . 8080\n", "\t\ttcp . 30000 . 10.244.0.3 . 8080\n"}
	for after, want := range map[uint32]int{0: 0, 7: 1} {
		e, err := NewEngine(Config{FastPathAfter: after}, w.family, proxier.Deps{})
		netnstest.Check(t, err)
		plan, err := e.Plan(m.full(w))
		netnstest.Check(t, err)
		for _, text := range append(rules, elements...) {
			if n := strings.Count(plan, text); n != want {
				t.Errorf("after %d packets: %q is in the plan %d times, want %d\n%s", after, text, n, want, plan)
			}
		}
	}
}
