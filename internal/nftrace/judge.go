package nftrace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chainname"
	"github.com/serviceplane/serviceplane/internal/enum"
	"github.com/serviceplane/serviceplane/proxier"
)

// PacketOutcome is what happened to a packet.
type PacketOutcome uint8

// The outcomes.
const (
	// OutcomeUnseen means that no packet came.
	OutcomeUnseen PacketOutcome = iota + 1
	// OutcomeTranslated means that the packet got another destination, and was delivered there
	// or left the node.
	OutcomeTranslated
	// OutcomePassed means that the packet was delivered or left the node with its destination.
	OutcomePassed
	// OutcomeRejected means that a rule answered with an ICMP message or a TCP reset.
	OutcomeRejected
	// OutcomeDropped means that a rule or a policy dropped the packet.
	OutcomeDropped
	// OutcomeLost means that the packet disappeared, and no rule of nf_tables did it.
	OutcomeLost
)

// String is the lower-case name of the outcome.
func (o PacketOutcome) String() string {
	return enum.Name(o, "", "unseen", "translated", "passed", "rejected", "dropped", "lost")
}

// Judgement compares the way of a packet with its explanation.
type Judgement struct {
	Outcome PacketOutcome
	// Packet is the judged one of the TraceResult; nil if no packet came.
	Packet *TracedPacket
	// By says in words who decided.
	By string
	// Step is the rule or policy that ended the packet; nil if none did.
	Step *MatchedRule
	// Destination is where the packet went at the end. Source is the one it had then.
	Source, Destination netip.AddrPort
	// Agrees reports whether the packet did what the explanation says.
	Agrees bool
	// Reasons are why Agrees is false, and hints.
	Reasons []string
}

// Ours reports whether a rule or a chain belongs to the proxy with these names, whatever its
// engine. A rule of a built-in chain that jumps to a chain of the proxy does.
func Ours(s *MatchedRule, names proxier.Names) bool {
	if s.Family != "ip" && s.Family != "ip6" {
		return false
	}
	if s.Table == names.Table || strings.HasPrefix(s.Table, names.Table+".") { // "….ipvs"
		return true
	}
	if !slices.Contains([]string{"nat", "filter", "mangle"}, s.Table) {
		return false
	}
	_, to, _ := strings.Cut(s.Verdict, " ") // "jump KUBE-SERVICES"
	return chainname.Owned(names.ChainPrefix, s.Chain) || chainname.Owned(names.ChainPrefix, to)
}

// Compare judges the packets of a trace. It returns the judgement of the first packet that
// does not agree with the explanation, or else of the first one. It does not know the
// engine userspace, which ends connections at its own sockets.
func Compare(r *TraceResult, e *desired.Explanation, names proxier.Names) Judgement {
	if len(r.Packets) == 0 {
		return unseen(r)
	}
	var first *Judgement
	for i := range r.Packets {
		j := judging{Judgement: Judgement{Packet: &r.Packets[i]}, explanation: e, names: names, legacy: r.LegacyTables, sent: r.Sent}
		j.judge()
		if !j.Agrees {
			return j.Judgement
		}
		if first == nil {
			first = &j.Judgement
		}
	}
	return *first
}

func unseen(r *TraceResult) Judgement {
	j := Judgement{Outcome: OutcomeUnseen, By: "no such packet came in time"}
	switch r.Sent {
	case "":
	case sentAnswered, sentUnanswered, sentRefused:
		j.By = "the packet was sent, but did not come: " + r.Sent
	default:
		j.By = "the packet could not be sent: " + r.Sent
	}
	j.Reasons = []string{"a packet can be stopped before the rules: by the routes of the sender, by XDP and other BPF programs, and by chains of the families netdev and bridge"}
	return j
}

// judging is a Judgement that is not complete yet.
type judging struct {
	Judgement

	explanation *desired.Explanation
	names       proxier.Names
	legacy      []string
	sent        string // TraceResult.Sent
}

func (j *judging) because(format string, args ...any) {
	j.Reasons = append(j.Reasons, fmt.Sprintf(format, args...))
}

func (j *judging) judge() {
	hops := j.Packet.Hops
	var first, last Hop
	if len(hops) > 0 {
		first, last = hops[0], hops[len(hops)-1]
	}
	j.Source, j.Destination = last.Source, last.Destination
	if n := len(j.Packet.Steps); n > 0 && j.Packet.Steps[n-1].Ends() {
		j.stopped(&j.Packet.Steps[n-1])
	} else if j.Packet.Lost {
		j.lost(last)
	} else {
		j.arrived(first, last)
	}
	if !j.Agrees {
		j.explainState()
	}
}

// Names of states of connection tracking; a packet has one.
const (
	stateEstablished = "established"
	stateInvalid     = "invalid"
	stateUntracked   = "untracked"
)

// explainState says what the state of the packet's connection has to do with what happened.
func (j *judging) explainState() {
	switch j.Packet.state() {
	case stateEstablished:
		j.because("the packet belongs to a connection that began before (ct state established): what the connection's first packet met decides for all")
	case stateInvalid:
		j.because("connection tracking finds no connection for the packet (ct state invalid): no rule translates such a packet")
	case stateUntracked:
		j.because("connection tracking leaves the packet out (ct state untracked), as a rule with notrack does: no rule translates such a packet")
	}
}

// state is what connection tracking says of the packet first; empty if the kernel does not tell it.
func (p *TracedPacket) state() string {
	for i := range p.Hops {
		if p.Hops[i].End {
			return p.Hops[i].State
		}
	}
	return ""
}

// stopped judges a packet that a rule or a policy stopped.
func (j *judging) stopped(s *MatchedRule) {
	j.Step, j.Outcome = s, OutcomeDropped
	did, want := "dropped", desired.VerdictDrop
	if s.Verdict == verdictReject {
		j.Outcome, did, want = OutcomeRejected, "rejected", desired.VerdictReject
	}
	by := "the policy"
	if !s.Policy {
		by = fmt.Sprintf("rule '%s' (handle %d)", s.Rule, s.Handle)
		if s.Command != "" {
			j.because("the rule is not printed as a whole: %s shows it, with handle %d", s.Command, s.Handle)
		}
	}
	ours := Ours(s, j.names)
	whose := "not a rule of this proxy"
	if s.Policy {
		whose = "not a chain of this proxy"
	}
	if ours {
		whose = "a rule of this proxy"
	}
	j.By = fmt.Sprintf("%s by %s of chain %s in table %s %s: %s", did, by, s.Chain, s.Family, s.Table, whose)
	switch {
	case ours && j.explanation.Verdict == want:
		j.Agrees = true
	case ours && j.explanation.Limit != "" && slices.ContainsFunc(j.Packet.Steps, func(s MatchedRule) bool { return strings.HasPrefix(s.Chain, "limit-") }):
		j.because("the client is above the limit of the Service: %s", j.explanation.Limit)
		j.Agrees = true
	case ours:
		j.because("the explanation says %v: the rules of this proxy are not those that it wants", j.explanation.Verdict)
	default:
		j.because("the explanation says %v, but another program stops the packet", j.explanation.Verdict)
	}
}

// lost judges a packet that disappeared.
func (j *judging) lost(last Hop) {
	j.Outcome = OutcomeLost
	if last.End {
		j.By = fmt.Sprintf("lost after hook %s: the kernel does not forward (sysctl ip_forward), has no route for it, or its reverse path filter or a BPF program dropped it", last.Hook)
		j.Agrees = j.explanation.Verdict == desired.VerdictPass
		if !j.Agrees {
			j.because("the explanation says %v", j.explanation.Verdict)
		}
		return
	}
	j.By = fmt.Sprintf("lost in hook %s, and no rule of nf_tables did it: rules of iptables-legacy and BPF programs cannot be seen", last.Hook)
	if v := j.explanation.Verdict; len(j.legacy) > 0 && (v == desired.VerdictDrop || v == desired.VerdictReject) {
		j.because("the explanation says %v: the proxy's own rules of iptables-legacy do that unseen, and so do others", v)
		j.Agrees = true
		return
	}
	if len(j.legacy) > 0 {
		j.because("iptables-legacy has the tables %s here: see iptables-legacy-save -c (ip6tables-legacy-save -c)", strings.Join(j.legacy, ", "))
	} else {
		j.because("iptables-legacy has no tables here: look for BPF programs")
	}
	j.because("the explanation says %v", j.explanation.Verdict)
}

// arrived judges a packet that was delivered or left the node.
func (j *judging) arrived(first, last Hop) {
	where := "left the node"
	if last.Hook == "input" {
		where = "was delivered on the node"
	}
	if first.Destination == last.Destination {
		j.Outcome, j.By = OutcomePassed, "no rule translated the packet: it "+where
		if j.Agrees = j.explanation.Verdict == desired.VerdictPass; !j.Agrees {
			j.because("the explanation says %v: the proxy's rules are gone or incomplete, or other rules accept the packet first", j.explanation.Verdict)
		}
		return
	}
	j.Outcome = OutcomeTranslated
	j.By = fmt.Sprintf("translated to %v%s, it %s%s", last.Destination, j.translator(), where, sourceText(first, last))
	j.Agrees = j.translationAgrees(first, last)
	switch j.sent {
	case sentUnanswered:
		j.because("no answer came: the endpoint does not answer, or something stops its packets on the way back")
	case sentRefused:
		j.because("the connection was refused: by the endpoint, if it does not listen there, or by something on the way to it")
	}
}

func sourceText(first, last Hop) string {
	if first.Source.Addr() == last.Source.Addr() {
		return " with its source"
	}
	return fmt.Sprintf(" with source %v", last.Source.Addr())
}

// translator returns the last rule that decided in the hook where the packet was translated.
func (j *judging) translator() string {
	for i := len(j.Packet.Steps) - 1; i >= 0; i-- {
		s := &j.Packet.Steps[i]
		if s.translates() {
			return fmt.Sprintf(" by rule (handle %d) of chain %s in table %s %s", s.Handle, s.Chain, s.Family, s.Table)
		}
	}
	if j.Packet.state() == stateEstablished {
		return " as the first packet of its connection was"
	}
	return ""
}

// translates reports whether the text of a rule is about the destination.
func (s *MatchedRule) translates() bool {
	return strings.Contains(s.Rule, "dnat") || strings.Contains(s.Rule, "DNAT")
}

func (j *judging) translationAgrees(first, last Hop) bool {
	e := j.explanation
	if e.Verdict != desired.VerdictForward {
		j.because("the explanation says %v, but the packet was translated", e.Verdict)
		return false
	}
	i := slices.IndexFunc(e.Endpoints, func(p desired.ExplainedEndpoint) bool { return p.Addr == last.Destination })
	if i < 0 || e.Endpoints[i].Excluded != "" {
		j.because("%v is not among the endpoints that the packet may go to", last.Destination)
		return false
	}
	changed := first.Source.Addr() != last.Source.Addr()
	switch {
	case changed && !e.Endpoints[i].Masquerade:
		j.because("the source became %v, but the explanation says that it is kept", last.Source.Addr())
		return false
	case !changed && e.Endpoints[i].Masquerade && e.Packet.Origin != desired.FromNode && last.Hook != "input": // masquerading is after that hook
		j.because("the source was kept, but the explanation says that it is masqueraded")
		return false
	}
	return true
}
