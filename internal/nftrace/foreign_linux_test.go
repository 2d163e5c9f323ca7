package nftrace_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nftrace"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestARuleOfAnotherProgramIsNamed: whatever it is that stops a packet to a Service, the
// judgement names it, and says that it is not the proxy's.
func TestARuleOfAnotherProgramIsNamed(t *testing.T) {
	const dropped, rejected = nftrace.OutcomeDropped, nftrace.OutcomeRejected
	for name, engine := range engines {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, engine)
			for what, test := range map[string]struct {
				add, remove string // commands of the node
				outcome     nftrace.PacketOutcome
				by          string
			}{
				"forward": {
					"nft add table inet foreign; add chain inet foreign strict { type filter hook forward priority 0; }; add rule inet foreign strict ip daddr 10.244.0.0/16 counter drop comment \"no pods\"; add rule inet foreign strict ip6 daddr fd00:10:244::/48 counter drop",
					"nft delete table inet foreign", dropped, "of chain strict in table inet foreign: not a rule of this proxy",
				},
				"before everything": {
					"nft add table inet foreign; add chain inet foreign strict { type filter hook prerouting priority -300; }; add rule inet foreign strict meta l4proto { tcp, udp } th dport 80 drop",
					"nft delete table inet foreign", dropped, "of chain strict in table inet foreign: not a rule of this proxy",
				},
				"last": {
					"nft add table inet foreign; add chain inet foreign strict { type filter hook postrouting priority 2000; }; add chain inet foreign deep; add rule inet foreign deep meta l4proto { tcp, udp } drop; add rule inet foreign strict jump deep",
					"nft delete table inet foreign", dropped, "rule 'meta l4proto { tcp, udp } drop' (handle 4) of chain deep in table inet foreign: not a rule of this proxy",
				},
				"policy": {
					"nft add table inet foreign; add chain inet foreign strict { type filter hook forward priority 10; policy drop; }",
					"nft delete table inet foreign", dropped, "dropped by the policy of chain strict in table inet foreign: not a chain of this proxy",
				},
				"reject": {
					"nft add table inet foreign; add chain inet foreign strict { type filter hook forward priority 10; }; add rule inet foreign strict meta l4proto { tcp, udp } reject",
					"nft delete table inet foreign", rejected, "rule 'meta l4proto { tcp, udp } reject' (handle 3) of chain strict in table inet foreign: not a rule of this proxy",
				},
				"iptables-nft": {
					"iptables-nft -I FORWARD -d 10.244.0.0/16 -j DROP; ip6tables-nft -I FORWARD -d fd00:10:244::/48 -j DROP",
					"iptables-nft -D FORWARD -d 10.244.0.0/16 -j DROP; ip6tables-nft -D FORWARD -d fd00:10:244::/48 -j DROP", dropped,
					"of chain FORWARD in table ip",
				},
				"iptables-nft, raw table": {
					"iptables-nft -t raw -I PREROUTING -p tcp --dport 80 -j DROP; iptables-nft -t raw -I PREROUTING -p udp --dport 80 -j DROP; ip6tables-nft -t raw -I PREROUTING -p tcp --dport 80 -j DROP; ip6tables-nft -t raw -I PREROUTING -p udp --dport 80 -j DROP",
					"iptables-nft -t raw -F PREROUTING; ip6tables-nft -t raw -F PREROUTING", dropped,
					"of chain PREROUTING in table ip",
				},
			} {
				w.shell(test.add)
				for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
					for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
						j := w.judge(w.toService(protocol, family))
						if j.Agrees || j.Outcome != test.outcome || !strings.Contains(j.By, test.by) || !strings.Contains(j.By, "not a ") || j.Step == nil || j.Step.Hook == "" {
							t.Errorf("%s, %v %v: %+v\nstep %+v\nwant %v %q", what, family, protocol, j, j.Step, test.outcome, test.by)
						}
					}
				}
				w.shell(test.remove)
				if j := w.judge(w.toService(desired.TCP, v1.IPv4Protocol)); !j.Agrees || j.Outcome != nftrace.OutcomeTranslated || j.Destination.String() != "10.244.1.2:8080" {
					t.Errorf("without %s: %+v, want it translated", what, j)
				}
			}
		})
	}
}

// passes are the hooks that packets to a Service pass on the node: from a host, to Services whose
// endpoint is a pod of the node (10) or the node itself (11).
var passes = []struct {
	origin desired.Origin
	vip    int
	hooks  []string
}{
	{desired.FromOutside, 10, []string{"prerouting", "forward", "postrouting"}},
	{desired.FromOutside, 11, []string{"prerouting", "input"}},
	{desired.FromPod, 10, []string{"prerouting", "forward", "postrouting"}},
	{desired.FromPod, 11, []string{"prerouting", "input"}},
	{desired.FromNode, 10, []string{"output", "postrouting"}},
	{desired.FromNode, 11, []string{"output", "postrouting", "input"}}, // nothing of prerouting is called for it: it has a route
}

// planters add a rule that drops, to a hook and an IP family. They return its chain.
var planters = map[string]func(w *world, hook string, family v1.IPFamily) (c chainOf, remove string){
	"nft": func(w *world, hook string, _ v1.IPFamily) (chainOf, string) {
		w.shell("nft add table inet foreign; add chain inet foreign strict { type filter hook " + hook + " priority 5; }; add rule inet foreign strict tcp dport { 80, 8080, 31999 } counter drop")
		return chainOf{"inet", "foreign", "strict"}, "nft delete table inet foreign"
	},
	"iptables-nft": func(w *world, hook string, family v1.IPFamily) (chainOf, string) {
		program, c := "iptables-nft", chainOf{"ip", "mangle", strings.ToUpper(hook)}
		if family == v1.IPv6Protocol {
			program, c.family = "ip6tables-nft", "ip6"
		}
		rule := fmt.Sprintf("%s -p tcp -m multiport --dports 80,8080,31999 -m comment --comment strict -j DROP", c.chain)
		w.shell(program + " -t mangle -A " + rule)
		return c, program + " -t mangle -D " + rule
	},
}

// A drop in each hook is named with table, chain, and the rule as nft prints it, for packets from pods, from the
// node and from outside.
func TestADropInEachHookIsNamed(t *testing.T) {
	for name, engine := range engines {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, engine)
			for program, plant := range planters {
				for _, way := range passes {
					for _, hook := range way.hooks {
						for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
							from := map[desired.Origin]*proxiertest.Host{desired.FromOutside: w.Client, desired.FromPod: w.LocalPods[1], desired.FromNode: w.Node}[way.origin]
							packet := desired.Packet{Protocol: desired.TCP, Source: from.Addr(family), Origin: way.origin, Destination: w.vip(way.vip, family)}
							what := fmt.Sprintf("%s in %s, %v from %v to %v", program, hook, family, way.origin, packet.Destination)
							in, remove := plant(w, hook, family)
							rules := rulesByNFT(t, func(script string) string { return w.command(w.Node, "sh", "-e", "-c", script) }, in)
							w.mustBlame(what, from, packet, in, rules[len(rules)-1], hook)
							w.shell(remove)
						}
					}
				}
			}
			for _, way := range passes { // without a rule of others
				from := map[desired.Origin]*proxiertest.Host{desired.FromOutside: w.Client, desired.FromPod: w.LocalPods[1], desired.FromNode: w.Node}[way.origin]
				packet := desired.Packet{Protocol: desired.TCP, Source: from.Addr(v1.IPv4Protocol), Origin: way.origin, Destination: w.vip(way.vip, v1.IPv4Protocol)}
				if j := w.judgeFrom(from, packet); !j.Agrees || j.Outcome != nftrace.OutcomeTranslated {
					t.Errorf("%+v: %+v, want it translated", packet, j)
				}
			}
		})
	}
}

// vip is the ClusterIP with a last number, at port 80.
func (w *world) vip(last int, family v1.IPFamily) netip.AddrPort {
	if family == v1.IPv6Protocol {
		return netip.MustParseAddrPort(fmt.Sprintf("[fd00:96::%d]:80", last))
	}
	return netip.MustParseAddrPort(fmt.Sprintf("10.96.0.%d:80", last))
}

// mustBlame sends a packet: the judgement names the rule of another program.
func (w *world) mustBlame(what string, from *proxiertest.Host, packet desired.Packet, in chainOf, rule, hook string) {
	w.t.Helper()
	j := w.judgeFrom(from, packet)
	if j.Step == nil || j.Outcome != nftrace.OutcomeDropped || j.Agrees {
		w.t.Errorf("%s: %+v, want it dropped", what, j)
		return
	}
	s := j.Step
	got := []string{s.Family, s.Table, s.Chain, s.Hook, s.Rule}
	if want := []string{in.family, in.table, in.chain, hook, rule}; !slices.Equal(got, want) {
		w.t.Errorf("%s: the judgement names\n%q, want\n%q", what, got, want)
	}
	if by := fmt.Sprintf("dropped by rule '%s' (handle %d) of chain %s in table %s %s: not a rule of this proxy", rule, s.Handle, in.chain, in.family, in.table); j.By != by {
		w.t.Errorf("%s: in words\n%s, want\n%s", what, j.By, by)
	}
}

// shell runs commands on the node. nft takes several statements as one command.
func (w *world) shell(commands string) {
	w.t.Helper()
	if nft, isNFT := strings.CutPrefix(commands, "nft "); isNFT {
		w.command(w.Node, "nft", nft)
		return
	}
	w.command(w.Node, "sh", "-e", "-c", commands)
}

// TestRulesOfLegacyCannotBeSeen: the judgement says so, and names the tables that exist.
func TestRulesOfLegacyCannotBeSeen(t *testing.T) {
	t.Parallel()
	w := newWorld(t, engines["nftables"])
	w.shell("iptables-legacy -I FORWARD -d 10.244.0.0/16 -j DROP")
	j := w.judge(w.toService(desired.TCP, v1.IPv4Protocol))
	if want := "lost in hook forward, and no rule of nf_tables did it: rules of iptables-legacy and BPF programs cannot be seen"; j.Agrees || j.Outcome != nftrace.OutcomeLost || j.By != want {
		t.Errorf("%+v, want %q", j, want)
	}
	if want := "iptables-legacy has the tables filter here"; !strings.Contains(strings.Join(j.Reasons, "\n"), want) {
		t.Errorf("reasons %q, want %q", j.Reasons, want)
	}
}

// A packet without a route is lost between two hooks.
func TestAPacketWithoutARouteIsLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, engines["nftables"])
	w.shell("ip route replace blackhole 10.244.1.0/28")
	j := w.judge(w.toService(desired.UDP, v1.IPv4Protocol))
	if want := "lost after hook prerouting: the kernel does not forward"; j.Agrees || j.Outcome != nftrace.OutcomeLost || !strings.HasPrefix(j.By, want) || j.Destination.String() != "10.244.1.2:8080" {
		t.Errorf("%+v, want %q", j, want)
	}
}

// TestADropOnTheWayBackLeavesTheConnectionUnanswered: the packet itself goes as explained.
func TestADropOnTheWayBackLeavesTheConnectionUnanswered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, engines["nftables"])
	w.shell("nft add table inet foreign; add chain inet foreign strict { type filter hook forward priority 0; }; add rule inet foreign strict tcp sport 8080 drop")
	j := w.judge(w.toService(desired.TCP, v1.IPv4Protocol))
	if !j.Agrees || j.Outcome != nftrace.OutcomeTranslated || !strings.Contains(strings.Join(j.Reasons, "\n"), "no answer came") {
		t.Errorf("%+v, want it translated, and a reason", j)
	}
}
