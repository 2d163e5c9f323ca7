package allpackets

import (
	"encoding/json"
	"flag"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	plant  = flag.String("allpackets.plant", "", "plant the faults that match a regular expression, and see which test catches them")
	plants = flag.Int("allpackets.plants", 0, "plant so many faults, by chance with -allpackets.seed")
)

// fault replaces a text in a file of the module.
type fault struct{ file, what, old, with string }

// faults are mistakes that somebody might make, in the trackers, the resolver, the driver and
// the planners.
func faults() []fault {
	return []fault{
		{"changetracker/parseservice.go", "load balancer IPs with ipMode Proxy are served", `ingress.IP == "" || ingress.IPMode != nil && *ingress.IPMode != v1.LoadBalancerIPModeVIP`, `ingress.IP == ""`},
		{"changetracker/parseservice.go", "Services of another proxy are served", `if !proxied(service) || !c.selects(service) {`, `if !proxied(service) {`},
		{"changetracker/parseservice.go", "a source range of all addresses counts as none", `restricted && !open[family] && p.ranges[family] == nil`, `restricted && p.ranges[family] == nil`},
		{"changetracker/parseservice.go", "internal policy Local counts as Cluster", `p.internalLocal = spec.InternalTrafficPolicy != nil &&`, `p.internalLocal = false && spec.InternalTrafficPolicy != nil &&`},
		{"changetracker/parseservice.go", "external policy Local means session affinity", `if spec.SessionAffinity == v1.ServiceAffinityClientIP {`, `if spec.ExternalTrafficPolicy == "Local" {`},
		{"changetracker/endpoint.go", "every endpoint that serves counts as terminating", `return e.Serving && e.Terminating && !e.Maintenance }`, `return e.Serving && !e.Maintenance }`},
		{"changetracker/endpoint.go", "an endpoint in maintenance that terminates gets connections", `return e.Serving && e.Terminating && !e.Maintenance }`, `return e.Serving && e.Terminating }`},
		{"changetracker/merge.go", "of an address in several slices, the last one counts", `best[last] = best[last].better(r)`, `best[last] = r`},
		{"changetracker/select.go", "with terminating endpoints only, a Service counts as one without endpoints", `anyServes := group.rank(p.Failover) > 0`, `anyServes := group.rank(p.Failover) > 1`},
		{"changetracker/select.go", "without ready endpoints, terminating ones are not used", `case g.ready == 0:`, `case g.ready < 0:`},
		{"changetracker/select.go", "zone hints count although some endpoints have none", `case g.zoneHinted == g.ready && g.zoneMatched > 0:`, `case g.zoneMatched > 0:`},
		{"changetracker/select.go", "one ready endpoint of the node is not enough for policy Local", `if g.readyLocal > 0 {`, `if g.readyLocal > 1 {`},
		{"changetracker/select.go", "all groups get connections", `if e.Priority != r.group {`, `if r.group > 9 {`},
		{"changetracker/select.go", "the last group serves", `g.rank(f) > best.rank(f)`, `g.rank(f) >= best.rank(f)`},
		{"desired/selection.go", "flows to a group that serves no more stay although they are to end", `return holds(p, e) && !choice.Ends(e)`, `return holds(p, e)`},
		{"desired/selection.go", "flows leave an endpoint that is only not ready although they are to stay", `return serves(e) || p.KeepFlows`, `return serves(e) || e.Ejected && p.KeepFlows`},
		{"changetracker/select.go", "policy Local uses the endpoints of all nodes", `case readyLocal:
		return e.Ready && r.isLocal(e)`, `case readyLocal:
		return e.Ready`},
		{"desired/resolve.go", "what must be dropped is rejected", `f.Action = Drop`, `f.Action = Reject`},
		{"desired/resolve.go", "pods lose external policy Local's exception when no endpoint is local", `f.ShortCircuit = f.ShortCircuit && s.Cluster.Len() > 0`, `f.ShortCircuit = f.ShortCircuit && f.Action == Forward`},
		{"desired/resolve.go", "masquerading of all leaves out Services without node port", `case r.MasqueradeAll:`, `case r.MasqueradeAll && p.NodePort != 0:`},
		{"desired/resolve.go", "external policy Local masquerades", `f.Scope, f.Masquerade, f.ShortCircuit = ScopeLocal, MasqueradeNone, true`, `f.Scope, f.ShortCircuit = ScopeLocal, true`},
		{"desired/resolve.go", "the node's first address in the source ranges does not admit the VIPs", `return primary >= 0 && contains(ranges, r.Node.Addresses[primary])`, `return primary > 0 && contains(ranges, r.Node.Addresses[primary])`},
		{"desired/resolve.go", "an endpoint in the node's pod ranges does not count as one of the node", `sameHost(e.Node, r.Node.Name) || contains(r.Node.PodCIDRs, e.Addr.Addr())`, `sameHost(e.Node, r.Node.Name)`},
		{"desired/resolver.go", "external IPs of the node are refused unless they must be", `return r.DenyNodeExternalIPs && slices.Contains`, `return !r.DenyNodeExternalIPs && slices.Contains`},
		{"desired/claim.go", "the older Service has a VIP, whatever its kind", `return cmp.Or(cmp.Compare(c.Kind, o.Kind), c.compareAge(o))`, `return c.compareAge(o)`},
		{"desired/claim.go", "a ClusterIP gives way to a node port", `return c.Kind != ClusterIP && c.Name != nodePort.Name &&`, `return c.Name != nodePort.Name &&`},
		{"desired/claim.go", "of Services of one age, the last UID has the VIP", `cmp.Compare(c.UID, o.UID)`, `cmp.Compare(o.UID, c.UID)`},
		{"proxier/node.go", "new addresses of the node accept no node ports", `NodeAddresses: ofFamily(node.Addresses, family)`, `NodeAddresses: ofFamily(c.Node.Addresses, family)`},
		{"proxier/sync.go", "the node is resolved as it was at the start", `Node:                node,`, `Node:                f.config.Node,`},
		{"internal/nftables/plan_linux.go", "pods are masqueraded in external policy Local's exception", `treatment{desired.MasqueradeNone, desired.ScopeCluster})`, `treatment{desired.MasqueradeAll, desired.ScopeCluster})`},
		{"internal/nftables/plan_linux.go", "other ports of external IPs are refused instead of those of ClusterIPs", `return f.Kind == desired.ClusterIP ||`, `return f.Kind != desired.NodePort ||`},
		{"internal/nftables/plan_linux.go", "source ranges are not checked", `pf.firewalled, pf.entry = pf.entry, classFirewall`, `pf.firewalled, pf.entry = pf.entry, pf.entry`},
		{"internal/nftables/plan_linux.go", "session affinity mixes local endpoints with all", `return affinityLocal
`, `return 0
`},
		{"internal/nftables/diff_linux.go", "the element of a frontend that goes stays", `if was.value != 0 {
		sink.remove(was.in, key, elementBytes{})`, `if was.value != 0 && is.value != 0 {
		sink.remove(was.in, key, elementBytes{})`},
		{"internal/nftables/diff_linux.go", "new source ranges are not written", `if !has(is, p) {`, `if has(is, p) {`},
		{"internal/nftables/diff_linux.go", "local endpoints are looked up among all", `from: offset(indexScope(i))}`, `from: offset(indexScope(0))}`},
		{"internal/nftables/diff_linux.go", "elements of endpoints that go stay", `if old != nil {
			sink.remove(was.in, was.key(k, i)`, `if old != nil && now != nil {
			sink.remove(was.in, was.key(k, i)`},
		{"internal/nftables/diff_linux.go", "a source range admits its first address only", `frontendKey(k).addr(p.Addr()), frontendKey(k).addr(lastAddr(p))`, `frontendKey(k).addr(p.Addr()), frontendKey(k).addr(p.Addr())`},
		{"internal/nftables/globals_linux.go", "addresses that no frontend needs any more stay in their set", `if was && !is {`, `if !was && !is {`},
		{"internal/nftables/globals_linux.go", "addresses that a frontend needs now are not in their set", `if is && !was {`, `if is && was {`},
		{"internal/nftables/layout_linux.go", "local endpoints are drawn from the numbers of all", `Modulus: slots, Type: unix.NFT_NG_RANDOM, Offset: from}`, `Modulus: slots, Type: unix.NFT_NG_RANDOM}`},
		{"internal/nftables/layout_linux.go", "the node ports leave out 127.0.0.1 only, not all of loopback", `netip.MustParsePrefix("127.0.0.0/8")`, `netip.MustParsePrefix("127.0.0.1/32")`},
		{"internal/nftables/layout_linux.go", "other ports of ClusterIPs are not refused", `r.refuse(setClusterIPs, chainReject, !r.inFront),`, `r.refuse(setClusterIPs, chainReject, false),`},
		{"iptables/plan.go", "what source ranges refuse reaches the node port of another Service", `if f.VIP.IsValid() && mayBeNodes && (f.Restricted || f.Action != desired.Forward) {`, `if f.VIP.IsValid() && mayBeNodes && f.Action != desired.Forward {`},
		{"iptables/plan.go", "external policy Local has no exception for pods without local endpoints", `if f.Action == desired.Forward || f.ShortCircuit {
		l.rules`, `if f.Action == desired.Forward {
		l.rules`},
		{"iptables/plan.go", "with source ranges and no endpoints, the rules for rejecting are missing", `if f.Action == desired.Reject {
				refuse(newRule().from(r)`, `if f.Action == desired.Drop {
				refuse(newRule().from(r)`},
		{"iptables/plan.go", "ClusterIPs do not masquerade", `p.masquerades[i] = append(p.masquerades[i], p.match(f).jump(to))`, `p.masquerades[i] = []rule{p.match(f).comment("%s", to).jump(to)}[:0]`},
		{"iptables/plan.go", "every connection of an endpoint to a Service is masqueraded", `newRule().fromAddr(addr).toAddr(addr)`, `newRule().fromAddr(addr)`},
		{"iptables/fixed.go", "node ports are at loopback too", `addJump(newRule().add("! -d %s", prefixText(loopback)))`, `addJump(newRule())`},
		{"iptables/apply_linux.go", "rules of the filter that go are deleted first", `changeOf(e.have[tableFilter], want[tableFilter], true)`, `changeOf(e.have[tableFilter], want[tableFilter], false)`},
		{"iptables/diff.go", "old rules do not stay until the new ones are complete", `c.first.chains[chain] = slices.Concat(rules, old)`, `c.first.chains[chain] = old`},
		{"iptables/tree.go", "chains that divide node ports by number have half of them", `high := low | uint16(1<<bits-1)`, `high := low | uint16(1<<bits-1)>>1`},
		{"ebpf/carry.go", "source ranges do not keep sockets from an address", `case f.Restricted:
		return scope, bySource`, `case f.Restricted && len(f.SourceRanges) == 0:
		return scope, bySource`},
		{"ebpf/carry.go", "without PodsKeepSource, sockets are translated that the rules would masquerade", `(!external || !c.PodsKeepSource)`, `!external`},
		{"ebpf/carry.go", "pods lose external policy Local's exception", `scope = desired.ScopeCluster
	case`, `scope = f.Scope
	case`},
		{"ebpf/carry.go", "the endpoints of all nodes are those of policy Local", `all.endpoints[index] = s.Endpoints(scope)`, `all.endpoints[index] = s.Endpoints(desired.ScopeCluster)`},
		{"ebpf/layer.go", "a frontend that goes stays in the map", `if !w.has(key) {`, `if !w.has(key) && scopes == 1 {`},
		{"ebpf/layer.go", "a frontend that gets another policy keeps the endpoints of the old one", `other != scope {`, `other != scope && scopes == 1 {`},
		{"ebpf/layer.go", "the last endpoint is never chosen", `newRange(b, endpoints.Len(), l.sequence)`, `newRange(b, max(1, endpoints.Len()-1), l.sequence)`},
		{"ebpf/tables_linux.go", "endpoints are written one place too late", `copy(m.endpoint(at), is[:])`, `copy(m.endpoint(at+1), is[:])`},
		{"iptables/plan.go", "node ports and external IPs do not drop", `case f.Action == desired.Drop:`, `case f.Action == desired.Drop && f.Kind == desired.ClusterIP:`},
	}
}

// byGate is how many of the catchers are what the gate runs.
const byGate = 2

// catchers are tests that may catch the fault, in order: packets, a test of the package without
// any, more packets.
func (f *fault) catchers() [][]string {
	packets, own := "-run=^TestAllPackets$/^nftables$", []string{"./desired", "-run=^TestRandomHistoriesAgreeWithTheOracle$"}
	switch {
	case strings.HasPrefix(f.file, "iptables/"):
		packets = "-run=^(TestAllPackets|TestNothingLeaksDuringAChange)$/legacy"
		own = []string{"./iptables", "-run=^TestPacketsFindTheirLeaf$"}
	case strings.HasPrefix(f.file, "ebpf/"):
		packets = "-run=^TestAllPackets$/^ebpf"
		own = []string{"./ebpf", "-run=^TestLayerHistories$"}
	case strings.HasPrefix(f.file, "proxier/"):
		packets = "-run=^TestAllPackets$"
	}
	return [][]string{
		{"./internal/allpackets", packets, "-allpackets.seed=1"},
		own,
		{"./internal/allpackets", packets, "-allpackets.seed=2", "-allpackets.seeds=5"},
		{"./internal/allpackets", packets, "-allpackets.seed=7", "-allpackets.seeds=24"},
	}
}

// TestPlantedFaults: each fault has a place. With -allpackets.plant=. each is caught, and the log
// says by which test. To plant all of them takes some 15 minutes; -allpackets.plants=3 plants three.
func TestPlantedFaults(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	caught, inGate := map[string]int{}, 0
	drawn := drawnFaults(t)
	for i, f := range faults() {
		path := filepath.Join(root, f.file)
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(content), f.old); n != 1 {
			t.Errorf("%s has the text %d times, want once: %s", f.file, n, f.old)
			continue
		}
		if drawn[i] || *plant != "" && regexp.MustCompile(*plant).MatchString(f.file+": "+f.what) {
			by, attempt := f.plant(t, root, path, strings.Replace(string(content), f.old, f.with, 1))
			if by == "" {
				t.Errorf("NOT CAUGHT: %s: %s", f.file, f.what)
			}
			if caught[by]++; attempt < byGate {
				inGate++
			}
			t.Logf("%s: %s: caught by %s", f.file, f.what, by)
		}
	}
	t.Logf("%d faults, caught by %v; by what the gate runs: %d", len(faults()), caught, inGate)
}

// drawnFaults returns the indexes of as many faults as -allpackets.plants says.
func drawnFaults(t *testing.T) map[int]bool {
	drawn := map[int]bool{}
	if *plants == 0 {
		return drawn
	}
	seed := *firstSeed
	if seed == 0 {
		seed = uint64(rand.Uint32())
	}
	t.Logf("%d faults by chance, seed %d", *plants, seed)
	for _, i := range rand.New(rand.NewPCG(seed, 0)).Perm(len(faults()))[:min(*plants, len(faults()))] {
		drawn[i] = true
	}
	return drawn
}

// plant returns the test that fails with the fault, and its number among the catchers.
func (f *fault) plant(t *testing.T, root, path, content string) (by string, attempt int) {
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
	for i, catcher := range f.catchers() {
		command := exec.CommandContext(t.Context(), "go", append([]string{"test", "-count=1", "-timeout=2h", "-overlay=" + overlay}, catcher...)...)
		command.Dir = root
		out, err := command.CombinedOutput()
		switch {
		case strings.Contains(string(out), "[build failed]"):
			t.Fatalf("%s: %s does not compile:\n%s", f.file, f.with, out)
		case strings.Contains(string(out), "--- FAIL: "):
			return strings.TrimPrefix(catcher[0], "./"), i
		case err != nil: // a time-out, for example
			t.Fatalf("%s: %s: no test failed, but %v:\n%s", f.file, f.with, err, out)
		}
	}
	return "", len(f.catchers())
}
