package nftables

import (
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier"
)

// plant is a damage, and the differences that Verify must find: "problem object". A "*" after
// it means that the difference names no service port.
type plant struct {
	command string
	want    []string
}

// plants are for the Services of verified. The words in capital letters are replaced.
func plants() map[string]plant {
	rules := func(chain string, from, to int) (list []string) {
		for n := from; n <= to; n++ {
			list = append(list, fmt.Sprintf("missing rule %d of chain %s*", n, chain))
		}
		return list
	}
	return map[string]plant{
		"table deleted":         {"delete table IP serviceplane", []string{"missing table IP serviceplane*"}},
		"table made dormant":    {"add table IP serviceplane { flags dormant; }", []string{"different table IP serviceplane*"}},
		"chain flushed":         {"flush chain IP serviceplane services", rules("services", 1, 2)},
		"rule inserted":         {"insert rule IP serviceplane services drop", []string{"unexpected rule 1 of chain services*"}},
		"rule replaced":         {"replace rule IP serviceplane services handle HANDLE drop", []string{"different rule 2 of chain services*"}},
		"rule deleted":          {"delete rule IP serviceplane services handle HANDLE", []string{"missing rule 2 of chain services*"}},
		"value in a rule":       {"flush chain IP serviceplane prerouting; add rule IP serviceplane prerouting jump pick", append(rules("prerouting", 2, 5), "different rule 1 of chain prerouting*")},
		"chain added":           {"add chain IP serviceplane foreign", []string{"unexpected chain foreign*"}},
		"base chain added":      {"add chain IP serviceplane late { type nat hook prerouting priority -150; }", []string{"unexpected chain late*"}},
		"base chain deleted":    {"delete chain IP serviceplane postrouting", []string{"missing chain postrouting*"}},
		"policy changed":        {"add chain IP serviceplane postrouting { type nat hook postrouting priority 99; policy drop; }", []string{"different chain postrouting*"}},
		"priority changed":      {"delete chain IP serviceplane output; add chain IP serviceplane output { type nat hook output priority -99; }", append(rules("output", 1, 5), "different chain output*")},
		"set added":             {"add set IP serviceplane foreign { type mark; }", []string{"unexpected set foreign*"}},
		"set deleted":           {"delete set IP serviceplane health-ports", []string{"missing set health-ports*"}},
		"set of another shape":  {"delete set IP serviceplane health-ports; add set IP serviceplane health-ports { type mark; }", []string{"different set health-ports*"}},
		"VIP added":             {"add element IP serviceplane cluster-ips { FREE }", []string{"unexpected element FREE of set cluster-ips*"}},
		"VIP deleted":           {"delete element IP serviceplane cluster-ips { VIP }", []string{"missing element VIP of set cluster-ips*"}},
		"frontend deleted":      {"delete element IP serviceplane services { VIP . tcp . 80 }", []string{"missing element VIP . tcp . 80 of map services"}},
		"frontend added":        {"add element IP serviceplane services { FREE . tcp . 80 : 0x80000001 }", []string{"unexpected element FREE . tcp . 80 of map services*"}},
		"frontend drops":        {"delete element IP serviceplane services { VIP . tcp . 80 }; add element IP serviceplane services { VIP . tcp . 80 : 0x80000002 }", []string{"different element VIP . tcp . 80 of map services"}},
		"node port deleted":     {"delete element IP serviceplane nodeports { tcp . 30000 }", []string{"missing element tcp . 30000 of map nodeports"}},
		"endpoint deleted":      {"delete element IP serviceplane endpoints { VIP . tcp . 80 . 0x00000001 }", []string{"missing element VIP . tcp . 80 . 0x00000001 of map endpoints"}},
		"endpoint replaced":     {"delete element IP serviceplane endpoints { VIP . tcp . 80 . 0x00000001 }; add element IP serviceplane endpoints { VIP . tcp . 80 . 0x00000001 : FREE . 8080 }", []string{"different element VIP . tcp . 80 . 0x00000001 of map endpoints"}},
		"endpoint twice":        {"delete element IP serviceplane endpoints { VIP . tcp . 80 . 0x00000001 }; add element IP serviceplane endpoints { VIP . tcp . 80 . 0x00000001 : POD3 . 8080 }", []string{"different element VIP . tcp . 80 . 0x00000001 of map endpoints"}},
		"endpoint added":        {"add element IP serviceplane endpoints { VIP . tcp . 80 . 0x00000003 : FREE . 8080 }", []string{"unexpected element VIP . tcp . 80 . 0x00000003 of map endpoints"}},
		"source range deleted":  {"delete element IP serviceplane source-ranges { LB . tcp . 80 . RANGE }", []string{"missing element LB . tcp . 80 . RANGE of set source-ranges"}},
		"source range added":    {"add element IP serviceplane source-ranges { LB . tcp . 80 . FREE }", []string{"unexpected element LB . tcp . 80 . FREE of set source-ranges"}},
		"firewall lost":         {"flush map IP serviceplane firewalled", []string{"missing element LB . tcp . 80 of map firewalled"}},
		"local policy lost":     {"flush map IP serviceplane nodeport-locals", []string{"missing element tcp . 30000 of map nodeport-locals"}},
		"short circuit lost":    {"flush map IP serviceplane nodeport-short-circuits", []string{"missing element tcp . 30000 of map nodeport-short-circuits"}},
		"global range added":    {"add element IP serviceplane service-cidrs { FAR }", []string{"unexpected element FAR of set service-cidrs*"}},
		"global range deleted":  {"flush set IP serviceplane nodeport-addresses", []string{"missing element ANY of set nodeport-addresses*"}},
		"class deleted":         {"delete element IP serviceplane classes { 0x80000001 }", []string{"missing element 0x80000001 of map classes*"}},
		"class elsewhere":       {"delete element IP serviceplane classes { 0x80000001 }; add element IP serviceplane classes { 0x80000001 : goto pick }", []string{"different element 0x80000001 of map classes*"}},
		"class comes back":      {"delete element IP serviceplane classes { 0x80000004 }; add element IP serviceplane classes { 0x80000004 : jump local }", []string{"different element 0x80000004 of map classes*"}},
		"class added":           {"add element IP serviceplane classes { 0x8000ffff : goto pick }", []string{"unexpected element 0x8000ffff of map classes*"}},
		"class of nobody":       {"add chain IP serviceplane all-cluster-9", []string{"missing element 0xc6000009 of map classes*", "missing element 0xc6000009 of map firewalled-classes*", "missing rule 1 of chain all-cluster-9*", "missing rule 2 of chain all-cluster-9*"}},
		"hairpin lost":          {"flush set IP serviceplane hairpin", []string{"missing element POD1 . POD1 of set hairpin*"}},
		"affinity off":          {"delete element IP serviceplane affinity-keys { STICKY . tcp . 80 }", []string{"missing element STICKY . tcp . 80 of map affinity-keys"}},
		"affinity pick lost":    {"delete element IP serviceplane affinity-picks { STICKY . tcp . 80 . 0x80000000 }", []string{"missing element STICKY . tcp . 80 . 0x80000000 of map affinity-picks"}},
		"affinity elsewhere":    {"delete element IP serviceplane affinity-endpoints { 0x00002001 }; add element IP serviceplane affinity-endpoints { 0x00002001 : FREE . 8080 }", []string{"different element 0x00002001 of map affinity-endpoints"}},
		"affinity draw lost":    {"flush map IP serviceplane affinity-counts", []string{"missing element 0x00002000 of map affinity-counts"}},
		"a record is no damage": {"add element IP serviceplane affinity { 0x00002000 . FREE timeout 1h : 0x00002001 }", nil},
	}
}

// verified programs Services of which the elements are known.
func verified(w *world) model {
	ready := func(last ...int) (list desired.Endpoints) {
		for _, n := range last {
			list = list.With(netip.AddrPortFrom(w.addr(244, n), 8080))
		}
		return list
	}
	web := &desired.Service{Name: name(0), Protocol: desired.TCP, Cluster: ready(1, 2, 3), Local: ready(1), OnNode: []netip.Addr{w.addr(244, 1)}}
	w.add(web, desired.Frontend{Kind: desired.NodePort, Port: 30000, Scope: desired.ScopeLocal, Masquerade: desired.MasqueradeNone, ShortCircuit: true})
	w.add(web, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, 0), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNonPod})
	w.add(web, desired.Frontend{
		Kind: desired.LoadBalancer, VIP: w.addr(200, 0), Port: 80, Scope: desired.ScopeCluster,
		Masquerade: desired.MasqueradeAll, Restricted: true, SourceRanges: []netip.Prefix{w.sourceRange()},
	})
	sticky := &desired.Service{Name: name(3), Protocol: desired.TCP, Cluster: ready(1, 2), Affinity: time.Hour}
	w.add(sticky, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, 3), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNonPod})
	return model{web.Name: web, sticky.Name: sticky}
}

// far is in no range of the globals.
func (w *world) far() string { return either(w.family == v1.IPv4Protocol, "192.0.2.1", "2001:db8::1") }

func (w *world) sourceRange() netip.Prefix {
	return netip.PrefixFrom(w.addr(1, 0), w.addr(0, 0).BitLen()-8)
}

func (p plant) in(w *world) plant {
	r := strings.NewReplacer("IP ", ipKeyword(w.family)+" ", "VIP", w.addr(96, 0).String(), "STICKY", w.addr(96, 3).String(), "LB", w.addr(200, 0).String(),
		"FREE", w.addr(99, 9).String(), "FAR", w.far(), "POD1", w.addr(244, 1).String(), "POD3", w.addr(244, 3).String(),
		"RANGE", w.sourceRange().String(), "ANY", netip.PrefixFrom(w.addr(0, 0), 0).Masked().String())
	changed := plant{command: r.Replace(p.command)}
	for _, want := range p.want {
		changed.want = append(changed.want, r.Replace(want))
	}
	return changed
}

// found are the differences as plant.want has them.
func found(r *proxier.Verification) (list []string) {
	for _, d := range r.Differences {
		object, _, _ := strings.Cut(d.Object, " in table ")
		text := d.Problem + " " + object
		if d.Service.Name == "" {
			text += "*"
		}
		list = append(list, text)
	}
	slices.Sort(list)
	return list
}

// TestVerifyNamesEachDamage changes the table as another program: Verify names what was
// changed and nothing else, and writes nothing. A check finds as much.
func TestVerifyNamesEachDamage(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		e, m := w.engine(t, ns), verified(w)
		mustApply(t, e, m.full(w))
		mustWriteNothing(t, e, m.full(w), "before all damages")
		for what, p := range plants() {
			t.Run(what, func(t *testing.T) { p.in(w).verify(t, ns, e, m.full(w)) })
		}
	})
}

// Elements that match what no other does are found and removed, in sets of each kind.
func TestCatchAllsAreFoundAndRemoved(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		e, m := w.engine(t, ns), verified(w)
		mustApply(t, e, m.full(w))
		const byHand = "" // nft 1.0.6 crashes
		for set, element := range map[string]string{
			"map endpoints": "* : FREE . 8080", "map services": "* : 0x80000002", "set cluster-ips": "*", "set nodeport-addresses": byHand,
			"map classes": "* : drop", "map affinity": "* : 0x00000001",
		} {
			command := damageTo(ns, "add element IP serviceplane "+strings.Fields(set)[1]+" { "+element+" }", e.family, netip.Addr{}, w.addr(96, 99))
			err := ns.Do(func() error {
				if element == byHand {
					b := e.newBatch()
					b.CatchAll(nft.AddElements(), setSpecs[setNodePortAddresses].name)
					return e.send(t.Context(), b)
				}
				return exec.Command("nft", command).Run()
			})
			if err != nil {
				if netnstest.KernelBefore(t, 5, 13) { // it has no catch-all elements
					return
				}
				t.Errorf("%s: %v", command, err)
				continue
			}
			want := "element * of " + set
			report, err := e.Verify(t.Context(), m.full(w))
			if err != nil || len(report.Differences) != 1 || !strings.HasPrefix(report.Differences[0].Object, want) {
				t.Errorf("with a catch-all in %s, Verify = %v, %v, want %q", set, report.Differences, err, want)
			}
			mustApply(t, e, m.full(w))
			if report, err := e.Verify(t.Context(), m.full(w)); err != nil || len(report.Differences) > 0 {
				t.Errorf("%s after a full sync: Verify = %v, %v, want no difference", set, report.Differences, err)
			}
		}
	})
}

// rulesetText is without the time that is left of records.
func rulesetText(t *testing.T, ns *netns.NS) string {
	t.Helper()
	return canonical(regexp.MustCompile(`expires \w+`).ReplaceAllString(mustList(t, ns), ""))
}

func (p plant) verify(t *testing.T, ns *netns.NS, e *Engine, full desired.Update) {
	mustNFT(t, ns, damageTo(ns, p.command, e.family, netip.Addr{}, netip.Addr{}))
	before := rulesetText(t, ns)
	report := mustVerify(t, e, full)
	if got, want := found(&report), slices.Sorted(slices.Values(p.want)); !slices.Equal(got, want) {
		t.Errorf("%s\nfound %q\nwant  %q", p.command, got, want)
	}
	if found := mustCheck(t, e); len(found) != len(p.want) {
		t.Errorf("%s\na check finds %v\nwant %q", p.command, found, p.want)
	}
	if after := rulesetText(t, ns); after != before {
		t.Errorf("Verify has changed the ruleset:\n%s\nit was\n%s", after, before)
	}
	mustApply(t, e, full)
	mustWriteNothing(t, e, full, "after the repair")
}
