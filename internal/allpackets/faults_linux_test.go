package allpackets

import (
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var plant = flag.String("allpackets.plant", "", "plant the faults that match a regular expression, and see which test catches them")

// fault replaces a text in a file of the module.
type fault struct{ file, old, with string }

// faults are mistakes that somebody might make, in the trackers, the resolver, the driver and
// the planners.
func faults() []fault {
	return []fault{
		{"changetracker/parseservice.go", `ingress.IP == "" || ingress.IPMode != nil && *ingress.IPMode != v1.LoadBalancerIPModeVIP`, `ingress.IP == ""`},
		{"changetracker/parseservice.go", `if !proxied(service) || !c.selects(service) {`, `if !proxied(service) {`},
		{"changetracker/parseservice.go", `restricted && !open[family] && p.ranges[family] == nil`, `restricted && p.ranges[family] == nil`},
		{"changetracker/parseservice.go", `p.internalLocal = spec.InternalTrafficPolicy != nil &&`, `p.internalLocal = false && spec.InternalTrafficPolicy != nil &&`},
		{"changetracker/parseservice.go", `if spec.SessionAffinity == v1.ServiceAffinityClientIP {`, `if spec.ExternalTrafficPolicy == "Local" {`},
		{"changetracker/endpoint.go", `return e.Serving && e.Terminating }`, `return e.Serving }`},
		{"changetracker/merge.go", `best[last] = best[last].better(r)`, `best[last] = r`},
		{"changetracker/select.go", `Any: s.ready > 0 || s.draining > 0,`, `Any: s.ready > 0,`},
		{"changetracker/select.go", `case s.ready == 0:`, `case s.ready < 0:`},
		{"changetracker/select.go", `case s.zoneHinted == s.ready && s.zoneMatched > 0:`, `case s.zoneMatched > 0:`},
		{"changetracker/select.go", `if s.readyLocal > 0 {`, `if s.readyLocal > 1 {`},
		{"changetracker/select.go", `case readyLocal:
		return e.Ready && r.isLocal(e)`, `case readyLocal:
		return e.Ready`},
		{"desired/resolve.go", `f.Action = Drop`, `f.Action = Reject`},
		{"desired/resolve.go", `f.ShortCircuit = f.ShortCircuit && len(s.Cluster) > 0`, `f.ShortCircuit = f.ShortCircuit && f.Action == Forward`},
		{"desired/resolve.go", `case r.MasqueradeAll:`, `case r.MasqueradeAll && p.NodePort != 0:`},
		{"desired/resolve.go", `f.Scope, f.Masquerade, f.ShortCircuit = ScopeLocal, MasqueradeNone, true`, `f.Scope, f.ShortCircuit = ScopeLocal, true`},
		{"desired/resolve.go", `if primary < 0 || !contains(ranges, r.Node.Addresses[primary]) {`, `if primary <= 0 || !contains(ranges, r.Node.Addresses[primary]) {`},
		{"desired/resolve.go", `sameHost(e.Node, r.Node.Name) || contains(r.Node.PodCIDRs, e.Addr.Addr())`, `sameHost(e.Node, r.Node.Name)`},
		{"desired/resolver.go", `|| r.DenyNodeExternalIPs && slices.Contains`, `|| !r.DenyNodeExternalIPs && slices.Contains`},
		{"desired/claim.go", `return cmp.Or(cmp.Compare(c.Kind, o.Kind), c.compareAge(o))`, `return c.compareAge(o)`},
		{"desired/claim.go", `return c.Kind != ClusterIP && c.Name != nodePort.Name &&`, `return c.Name != nodePort.Name &&`},
		{"desired/claim.go", `cmp.Compare(c.UID, o.UID)`, `cmp.Compare(o.UID, c.UID)`},
		{"proxier/node.go", `NodeAddresses: ofFamily(node.Addresses, family)`, `NodeAddresses: ofFamily(c.Node.Addresses, family)`},
		{"proxier/sync.go", `Node:                node,`, `Node:                f.config.Node,`},
		{"internal/nftables/plan_linux.go", `treatment{desired.MasqueradeNone, desired.ScopeCluster})`, `treatment{desired.MasqueradeAll, desired.ScopeCluster})`},
		{"internal/nftables/plan_linux.go", `return f.Kind == desired.ClusterIP
`, `return f.Kind != desired.NodePort
`},
		{"internal/nftables/plan_linux.go", `pf.firewalled, pf.entry = pf.entry, classFirewall`, `pf.firewalled, pf.entry = pf.entry, pf.entry`},
		{"internal/nftables/plan_linux.go", `return affinityLocal
`, `return 0
`},
		{"internal/nftables/diff_linux.go", `if was.value != 0 {
		sink.remove(was.in, key, elementBytes{})`, `if was.value != 0 && is.value != 0 {
		sink.remove(was.in, key, elementBytes{})`},
		{"internal/nftables/diff_linux.go", `if !has(is, p) {`, `if has(is, p) {`},
		{"internal/nftables/diff_linux.go", `from: offset(indexScope(i))}`, `from: offset(indexScope(0))}`},
		{"internal/nftables/diff_linux.go", `if i < len(was.list) {
			sink.remove(was.in, was.key(k, i)`, `if inBoth {
			sink.remove(was.in, was.key(k, i)`},
		{"internal/nftables/diff_linux.go", `frontendKey(k).addr(p.Addr()), frontendKey(k).addr(lastAddr(p))`, `frontendKey(k).addr(p.Addr()), frontendKey(k).addr(p.Addr())`},
		{"internal/nftables/globals_linux.go", `if was && !is {`, `if !was && !is {`},
		{"internal/nftables/globals_linux.go", `if is && !was {`, `if is && was {`},
		{"internal/nftables/layout_linux.go", `Modulus: slots, Type: unix.NFT_NG_RANDOM, Offset: from}`, `Modulus: slots, Type: unix.NFT_NG_RANDOM}`},
		{"internal/nftables/layout_linux.go", `netip.MustParsePrefix("127.0.0.0/8")`, `netip.MustParsePrefix("127.0.0.1/32")`},
		{"internal/nftables/layout_linux.go", `r.refuse(setClusterIPs, chainReject, !r.inFront),`, `r.refuse(setClusterIPs, chainReject, false),`},
		{"iptables/plan.go", `if f.VIP.IsValid() && mayBeNodes && (f.Restricted || f.Action != desired.Forward) {`, `if f.VIP.IsValid() && mayBeNodes && f.Action != desired.Forward {`},
		{"iptables/plan.go", `if f.Action == desired.Forward || f.ShortCircuit {
		l.rules`, `if f.Action == desired.Forward {
		l.rules`},
		{"iptables/plan.go", `if f.Action == desired.Reject {
				refuse(newRule().from(r)`, `if f.Action == desired.Drop {
				refuse(newRule().from(r)`},
		{"iptables/plan.go", `p.masquerades[i] = append(p.masquerades[i], p.match(f).jump(to))`, `p.masquerades[i] = []rule{p.match(f).comment("%s", to).jump(to)}[:0]`},
		{"iptables/plan.go", `newRule().fromAddr(addr).toAddr(addr)`, `newRule().fromAddr(addr)`},
		{"iptables/fixed.go", `addJump(newRule().add("! -d %s", prefixText(loopback)))`, `addJump(newRule())`},
		{"iptables/apply_linux.go", `changeOf(e.have[tableFilter], want[tableFilter], true)`, `changeOf(e.have[tableFilter], want[tableFilter], false)`},
		{"iptables/diff.go", `c.first.chains[chain] = slices.Concat(rules, old)`, `c.first.chains[chain] = old`},
		{"iptables/tree.go", `high := low | uint16(1<<bits-1)`, `high := low | uint16(1<<bits-1)>>1`},
		{"iptables/plan.go", `case f.Action == desired.Drop:`, `case f.Action == desired.Drop && f.Kind == desired.ClusterIP:`},
	}
}

// catchers are tests that may catch the fault, in order.
func (f *fault) catchers() [][]string {
	packets := "-run=^TestAllPackets$/^nftables$"
	switch {
	case strings.HasPrefix(f.file, "iptables/"):
		packets = "-run=^(TestAllPackets|TestNothingLeaksDuringAChange)$/legacy"
	case strings.HasPrefix(f.file, "proxier/"):
		packets = "-run=^TestAllPackets$"
	}
	return [][]string{
		{"./internal/allpackets", packets, "-allpackets.seed=1", "-allpackets.seeds=6"},
		{"./desired", "-run=^TestRandomHistoriesAgreeWithTheOracle$"},
	}
}

// TestPlantedFaults: each fault has a place, and with -allpackets.plant=. each is
// caught. To plant all of them takes some 15 minutes.
func TestPlantedFaults(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	caught := map[string]int{}
	for _, f := range faults() {
		path := filepath.Join(root, f.file)
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(content), f.old); n != 1 {
			t.Errorf("%s has the text %d times, want once: %s", f.file, n, f.old)
			continue
		}
		if *plant != "" && regexp.MustCompile(*plant).MatchString(f.file+": "+f.with) {
			by := f.plant(t, root, path, strings.Replace(string(content), f.old, f.with, 1))
			if by == "" {
				t.Errorf("NOT CAUGHT: %s: %s", f.file, f.with)
			}
			caught[by]++
			t.Logf("%s: %s: caught by %s", f.file, f.with, by)
		}
	}
	t.Logf("%d faults, caught by %v", len(faults()), caught)
}

// plant returns the test that fails with the fault.
func (f *fault) plant(t *testing.T, root, path, content string) (by string) {
	directory := t.TempDir()
	changed, overlay := filepath.Join(directory, "changed.go"), filepath.Join(directory, "overlay.json")
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{changed: []byte(content), overlay: replace} {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, catcher := range f.catchers() {
		command := exec.CommandContext(t.Context(), "go", append([]string{"test", "-count=1", "-overlay=" + overlay}, catcher...)...)
		command.Dir = root
		out, err := command.CombinedOutput()
		switch {
		case strings.Contains(string(out), "[build failed]"):
			t.Fatalf("%s: %s does not compile:\n%s", f.file, f.with, out)
		case err != nil:
			return catcher[0]
		}
	}
	return ""
}
