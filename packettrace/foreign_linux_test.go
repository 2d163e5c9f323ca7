package packettrace_test

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/packettrace"
)

// TestARuleOfAnotherProgramIsNamed: whatever it is that stops a packet to a Service, the
// judgement names it, and says that it is not the proxy's.
func TestARuleOfAnotherProgramIsNamed(t *testing.T) {
	const dropped, rejected = packettrace.OutcomeDropped, packettrace.OutcomeRejected
	for name, engine := range engines {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, engine)
			for what, test := range map[string]struct {
				add, remove string // commands of the node
				outcome     packettrace.Outcome
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
				if j := w.judge(w.toService(desired.TCP, v1.IPv4Protocol)); !j.Agrees || j.Outcome != packettrace.OutcomeTranslated || j.Destination.String() != "10.244.1.2:8080" {
					t.Errorf("without %s: %+v, want it translated", what, j)
				}
			}
		})
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
	if want := "lost in hook forward, and no rule of nf_tables did it: rules of iptables-legacy and BPF programs cannot be seen"; j.Agrees || j.Outcome != packettrace.OutcomeLost || j.By != want {
		t.Errorf("%+v, want %q", j, want)
	}
	if want := "iptables-legacy has the tables filter here"; !strings.Contains(strings.Join(j.Reasons, "\n"), want) {
		t.Errorf("reasons %q, want %q", j.Reasons, want)
	}
}

// TestAPacketWithoutARouteIsLost between two hooks.
func TestAPacketWithoutARouteIsLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, engines["nftables"])
	w.shell("ip route replace blackhole 10.244.1.0/28")
	j := w.judge(w.toService(desired.UDP, v1.IPv4Protocol))
	if want := "lost after hook prerouting: the kernel has no route for it"; j.Agrees || j.Outcome != packettrace.OutcomeLost || !strings.HasPrefix(j.By, want) || j.Destination.String() != "10.244.1.2:8080" {
		t.Errorf("%+v, want %q", j, want)
	}
}

// TestADropOnTheWayBackLeavesTheConnectionUnanswered: the packet itself goes as explained.
func TestADropOnTheWayBackLeavesTheConnectionUnanswered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, engines["nftables"])
	w.shell("nft add table inet foreign; add chain inet foreign strict { type filter hook forward priority 0; }; add rule inet foreign strict tcp sport 8080 drop")
	j := w.judge(w.toService(desired.TCP, v1.IPv4Protocol))
	if !j.Agrees || j.Outcome != packettrace.OutcomeTranslated || !strings.Contains(strings.Join(j.Reasons, "\n"), "no answer came") {
		t.Errorf("%+v, want it translated, and a reason", j)
	}
}
