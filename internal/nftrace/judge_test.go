package nftrace

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

const (
	client   = "192.0.2.9:40000"
	nodeAddr = "192.0.2.1:1024"
	vip      = "10.96.0.10:80"
	pod      = "10.244.1.2:8080"
)

// hop parses "hook source destination".
func hop(hook, from, to string) Hop {
	name, isEnd := strings.CutSuffix(hook, "$")
	return Hop{Hook: name, End: isEnd, Source: netip.MustParseAddrPort(from), Destination: netip.MustParseAddrPort(to)}
}

// explained is the explanation of a packet from outside with one endpoint.
func explained(v desired.Verdict, masquerade bool, excluded changetracker.Exclusion) *desired.Explanation {
	return &desired.Explanation{
		Verdict: v, Packet: desired.Packet{Origin: desired.FromOutside},
		Endpoints: []desired.ExplainedEndpoint{{
			Endpoint: changetracker.Endpoint{Addr: netip.MustParseAddrPort(pod)}, Masquerade: masquerade, Excluded: excluded,
		}},
	}
}

func TestJudge(t *testing.T) {
	t.Parallel()
	arrives := hop("prerouting", client, vip)
	ours := MatchedRule{Family: "ip", Table: "serviceplane", Chain: "reject", Handle: 3, Rule: "reject", Verdict: "reject"}
	foreign := MatchedRule{Family: "inet", Table: "firewall", Chain: "forward", Handle: 7, Rule: "ip saddr 10.0.0.0/8 drop", Verdict: "drop"}
	for name, test := range map[string]struct {
		packet  TracedPacket
		legacy  []string
		explain *desired.Explanation
		outcome PacketOutcome
		agrees  bool
		text    string // in By or Reasons
	}{
		"translated":                              {TracedPacket{Hops: []Hop{arrives, hop("postrouting$", client, pod)}}, nil, explained(desired.VerdictForward, false, ""), OutcomeTranslated, true, "translated to 10.244.1.2:8080, it left the node with its source"},
		"masqueraded":                             {TracedPacket{Hops: []Hop{arrives, hop("postrouting$", nodeAddr, pod)}}, nil, explained(desired.VerdictForward, true, ""), OutcomeTranslated, true, "with source 192.0.2.1"},
		"masqueraded against the explanation":     {TracedPacket{Hops: []Hop{arrives, hop("postrouting$", nodeAddr, pod)}}, nil, explained(desired.VerdictForward, false, ""), OutcomeTranslated, false, "the explanation says that it is kept"},
		"not masqueraded against the explanation": {TracedPacket{Hops: []Hop{arrives, hop("postrouting$", client, pod)}}, nil, explained(desired.VerdictForward, true, ""), OutcomeTranslated, false, "the explanation says that it is masqueraded"},
		"to an endpoint that is excluded":         {TracedPacket{Hops: []Hop{arrives, hop("postrouting$", client, pod)}}, nil, explained(desired.VerdictForward, false, "not ready"), OutcomeTranslated, false, "not among the endpoints that the packet may go to"},
		"translated though dropped":               {TracedPacket{Hops: []Hop{arrives, hop("input$", client, pod)}}, nil, explained(desired.VerdictDrop, false, ""), OutcomeTranslated, false, "the explanation says drop, but the packet was translated"},
		"passed":                                  {TracedPacket{Hops: []Hop{arrives, hop("input$", client, vip)}}, nil, explained(desired.VerdictPass, false, ""), OutcomePassed, true, "it was delivered on the node"},
		"passed against the explanation":          {TracedPacket{Hops: []Hop{arrives, hop("postrouting$", client, vip)}}, nil, explained(desired.VerdictForward, false, ""), OutcomePassed, false, "the proxy's rules are gone or incomplete"},
		"rejected":                                {TracedPacket{Hops: []Hop{arrives}, Steps: []MatchedRule{ours}}, nil, explained(desired.VerdictReject, false, ""), OutcomeRejected, true, "rejected by rule 'reject' (handle 3) of chain reject in table ip serviceplane: a rule of this proxy"},
		"rejected against the explanation":        {TracedPacket{Hops: []Hop{arrives}, Steps: []MatchedRule{ours}}, nil, explained(desired.VerdictDrop, false, ""), OutcomeRejected, false, "are not those that it wants"},
		"dropped by another program":              {TracedPacket{Hops: []Hop{arrives}, Steps: []MatchedRule{foreign}}, nil, explained(desired.VerdictDrop, false, ""), OutcomeDropped, false, "dropped by rule 'ip saddr 10.0.0.0/8 drop' (handle 7) of chain forward in table inet firewall: not a rule of this proxy"},
		"lost in a hook": {
			TracedPacket{Hops: []Hop{arrives, hop("forward", client, pod)}, Lost: true},
			[]string{"filter", "nat"},
			explained(desired.VerdictForward, false, ""),
			OutcomeLost, false, "iptables-legacy has the tables filter, nat here",
		},
		"lost as explained, maybe by the proxy": {
			TracedPacket{Hops: []Hop{arrives}, Lost: true},
			[]string{"filter"},
			explained(desired.VerdictReject, false, ""),
			OutcomeLost, true, "the proxy's own rules of iptables-legacy do that unseen, and so do others",
		},
		"lost in a hook without iptables-legacy": {TracedPacket{Hops: []Hop{arrives, hop("forward", client, pod)}, Lost: true}, nil, explained(desired.VerdictPass, false, ""), OutcomeLost, false, "iptables-legacy has no tables here: look for BPF programs"},
		"lost between hooks":                     {TracedPacket{Hops: []Hop{arrives, hop("prerouting$", client, vip)}, Lost: true}, nil, explained(desired.VerdictPass, false, ""), OutcomeLost, true, "lost after hook prerouting"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := Compare(&TraceResult{Packets: []TracedPacket{test.packet}, LegacyTables: test.legacy}, test.explain, proxier.DefaultNames())
			if j.Outcome != test.outcome || j.Agrees != test.agrees || !strings.Contains(strings.Join(append(j.Reasons, j.By), "\n"), test.text) {
				t.Errorf("%+v\nwant %v, agrees %v, %q", j, test.outcome, test.agrees, test.text)
			}
			if !j.Agrees && len(j.Reasons) == 0 {
				t.Error("no reason why it does not agree")
			}
		})
	}
}

// The answer of an endpoint is a hint. It does not change whether the packet went as explained.
func TestWhatAnEndpointAnswersIsAHint(t *testing.T) {
	t.Parallel()
	packets := []TracedPacket{{Hops: []Hop{hop("prerouting", client, vip), hop("postrouting$", client, pod)}}}
	for sent, want := range map[string]string{sentAnswered: "", sentUnanswered: "no answer came", sentRefused: "the connection was refused"} {
		j := Compare(&TraceResult{Packets: packets, Sent: sent}, explained(desired.VerdictForward, false, ""), proxier.DefaultNames())
		if got := strings.Join(j.Reasons, ""); !j.Agrees || (got == "") != (want == "") || !strings.HasPrefix(got, want) {
			t.Errorf("%s: %+v, want it to agree with reason %q", sent, j, want)
		}
	}
}

// Of several packets, the first one that disagrees is shown.
func TestTheFirstPacketThatDisagreesIsShown(t *testing.T) {
	t.Parallel()
	good := TracedPacket{Hops: []Hop{hop("prerouting", client, vip), hop("postrouting$", client, pod)}}
	bad := TracedPacket{Hops: []Hop{hop("prerouting", client, vip), hop("postrouting$", client, vip)}}
	explanation := explained(desired.VerdictForward, false, "")
	if j := Compare(&TraceResult{Packets: []TracedPacket{good, bad}}, explanation, proxier.DefaultNames()); j.Agrees || j.Outcome != OutcomePassed {
		t.Errorf("%+v, want the second packet", j)
	}
	if j := Compare(&TraceResult{Packets: []TracedPacket{good, good}}, explanation, proxier.DefaultNames()); !j.Agrees || j.Outcome != OutcomeTranslated {
		t.Errorf("%+v, want it to agree", j)
	}
}

func TestOurs(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		step MatchedRule
		want bool
	}{
		{MatchedRule{Family: "ip", Table: "serviceplane", Chain: "drop"}, true},
		{MatchedRule{Family: "ip6", Table: "serviceplane", Chain: "drop"}, true},
		{MatchedRule{Family: "ip", Table: "serviceplane.ipvs", Chain: "drop"}, true},
		{MatchedRule{Family: "inet", Table: "serviceplane", Chain: "drop"}, false},
		{MatchedRule{Family: "ip", Table: "serviceplane-edge", Chain: "drop"}, false},
		{MatchedRule{Family: "ip", Table: "nat", Chain: "SPL-SERVICES"}, true},
		{MatchedRule{Family: "ip", Table: "nat", Chain: "PREROUTING", Verdict: "jump SPL-SERVICES"}, true},
		{MatchedRule{Family: "ip", Table: "nat", Chain: "PREROUTING", Verdict: "jump KUBE-SERVICES"}, false},
		{MatchedRule{Family: "ip", Table: "nat", Chain: "SPL_EDGE-SERVICES"}, false},
		{MatchedRule{Family: "ip", Table: "raw", Chain: "SPL-SERVICES"}, false},
	} {
		if got := Ours(&test.step, proxier.DefaultNames()); got != test.want {
			t.Errorf("Ours(%+v) = %v, want %v", test.step, got, test.want)
		}
	}
	for chain, want := range map[string]bool{"KUBE-SERVICES": true, "KUBE-FIREWALL": false, "KUBE-ROUTER-INPUT": false} { // of the kubelet, of kube-router
		for _, step := range []MatchedRule{{Family: "ip", Table: "filter", Chain: chain}, {Family: "ip", Table: "filter", Chain: "INPUT", Verdict: "jump " + chain}} {
			if got := Ours(&step, proxier.KubeProxyNames()); got != want {
				t.Errorf("Ours(%+v) = %v, want %v", step, got, want)
			}
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	good := desired.Packet{
		Protocol: desired.TCP, Source: netip.MustParseAddr("192.0.2.9"), Destination: netip.MustParseAddrPort(vip), Origin: desired.FromOutside,
	}
	other := good
	other.Source = netip.MustParseAddr("2001:db8::1")
	sctp := good
	sctp.Protocol = desired.SCTP
	v6 := netip.MustParseAddrPort("[2001:db8::1]:80")
	for name, o := range map[string]Options{
		"nothing":        {},
		"other family":   {Packet: other},
		"limit":          {Packet: good, Limit: MaxLimit + 1},
		"timeout":        {Packet: good, Timeout: MaxTimeout + 1},
		"send nothing":   {Send: true, Matches: []Match{{Protocol: desired.TCP, Destination: v6}}},
		"send SCTP":      {Packet: sctp, Send: true},
		"send and while": {Packet: good, Send: true, SourcePort: 1},
		"two families":   {Packet: good, Matches: []Match{{Protocol: desired.TCP, Destination: v6}}},
		"no address":     {Matches: []Match{{Protocol: desired.TCP}}},
		"no protocol":    {Matches: []Match{{Destination: v6}}},
	} {
		if err := o.Validate(); !errors.Is(err, ErrOptions) {
			t.Errorf("%s: %v, want %v", name, err, ErrOptions)
		}
	}
	for name, o := range map[string]Options{
		"packet":  {Packet: good, Limit: MaxLimit, Timeout: time.Second},
		"send":    {Packet: good, Send: true},
		"matches": {Matches: []Match{{Protocol: desired.UDP, Source: v6}}},
	} {
		if err := o.Validate(); err != nil {
			t.Errorf("%s: %v, want nil", name, err)
		}
	}
}
