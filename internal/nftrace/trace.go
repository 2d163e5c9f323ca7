package nftrace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// Bounds of Options.
const (
	DefaultTimeout = 5 * time.Second
	MaxTimeout     = 10 * time.Minute
	MaxLimit       = 1000
)

// ErrOptions is wrapped by every error about an invalid field of Options.
var ErrOptions = errors.New("invalid options of a trace")

// Options say which packets are traced.
type Options struct {
	// NetNS is the network namespace whose rules the packets pass: a path, or a name under
	// /run/netns. Empty means that of the process.
	NetNS string
	// Packet is the packet to follow. Its Interface does not matter. With Protocol TCP only
	// the packets that open connections are traced.
	Packet desired.Packet
	// SourcePort restricts the trace to one source port; 0 means any.
	SourcePort uint16
	// Matches are more packets to follow, beside or instead of Packet.
	Matches []Match
	// Limit is the number of packets after which the trace ends, up to MaxLimit; 0 means 1.
	Limit int
	// Timeout ends the trace, up to MaxTimeout; 0 means DefaultTimeout.
	Timeout time.Duration
	// Send sends Packet itself: Trace opens a TCP connection, or sends a UDP datagram and
	// waits for an answer. The source port is a new one, and only that is traced.
	Send bool
	// SendFrom is the network namespace to send from, like NetNS. Empty means NetNS. The
	// Source of Packet must be an address there.
	SendFrom string
	// While is a function that causes the packets; nil if Trace waits for them. The trace ends
	// when it has returned and the packets until then have ended. Its context ends with the
	// Timeout. Trace ignores its error.
	While func(context.Context) error
}

// Match is a set of packets.
type Match struct {
	Protocol desired.Protocol
	// Origin FromNode means packets that the node sends; another one means those that arrive
	// at the node; 0 means both.
	Origin desired.Origin
	// Source and Destination are of the same IP family. One of them may be the zero value, and
	// the port of each may be 0: any is meant.
	Source, Destination netip.AddrPort
	// Opening means only packets that open a TCP connection.
	Opening bool
}

// TraceResult is what happened to the packets.
type TraceResult struct {
	// Packets are the traced packets in the order of their arrival.
	Packets []TracedPacket
	// Sent is how it went to send the packet: answered, no answer, connection refused, or an
	// error. It is empty without Options.Send.
	Sent string
	// LegacyTables are the tables of iptables-legacy in the network namespace and the IP
	// family; their rules cannot be seen.
	LegacyTables []string
}

// TracedPacket is the way of one packet.
type TracedPacket struct {
	// Steps are the rules that the packet matched and the policies that it met, in order.
	Steps []MatchedRule
	// Hops are the points that it reached.
	Hops []Hop
	// Lost means that the packet did not come further than the last of Hops, without a rule or
	// a policy of nf_tables that stopped it.
	Lost bool
}

// Hop is a point of a packet's way: the begin or the end of a hook.
type Hop struct {
	// Hook is prerouting, input, forward, output or postrouting.
	Hook string
	// End reports whether all rules of the hook are passed.
	End bool
	// Source and Destination are those of the packet there.
	Source      netip.AddrPort
	Destination netip.AddrPort
	// Loopback means that the packet leaves through a loopback interface: it arrives again.
	Loopback bool
	// State is what connection tracking says of the packet at the end of the hook: new, established, related,
	// invalid or untracked. It is empty if the kernel does not tell it, as before Linux 6.16.
	State string
}

// MatchedRule is a rule that a packet matched, or the policy of a base chain.
type MatchedRule struct {
	// Family is ip, ip6 or inet; Table and Chain are names.
	Family string
	Table  string
	Chain  string
	// Hook and Priority are those of the base chain that the packet came through.
	Hook     string
	Priority int
	// Handle is that of the rule, as nft -a list ruleset prints it; 0 for the policy of a
	// base chain.
	Handle uint64
	// Rule is the text of the rule as nft list prints it, without the numbers of counters. It is
	// empty without Handle, and if the rule was deleted meanwhile.
	Rule string
	// Command prints the rule by its Handle. It is empty if Rule is complete; otherwise a part of
	// Rule is only the name of an expression or of an extension of iptables.
	Command string
	// Comment is that of the rule.
	Comment string
	// Policy means that no rule of the base chain decided.
	Policy bool
	// Verdict is accept, drop, reject, continue, return, queue, stolen, "jump …" or "goto …".
	Verdict string
}

// Verdicts of a Step that end a packet.
const (
	verdictDrop   = "drop"
	verdictReject = "reject"
	verdictStolen = "stolen"
)

// Values of TraceResult.Sent; others are errors.
const (
	sentAnswered   = "answered"
	sentUnanswered = "no answer"
	sentRefused    = "connection refused"
)

// Ends reports whether the packet goes no further.
func (s *MatchedRule) Ends() bool {
	return s.Verdict == verdictDrop || s.Verdict == verdictReject || s.Verdict == verdictStolen
}

// withDefaults also adds the Match of Packet.
func (o Options) withDefaults() Options {
	o.Limit = cmp.Or(o.Limit, 1)
	o.Timeout = cmp.Or(o.Timeout, DefaultTimeout)
	o.SendFrom = cmp.Or(o.SendFrom, o.NetNS)
	p := &o.Packet
	if p.Protocol != 0 {
		to := netip.AddrPortFrom(p.Destination.Addr().Unmap().WithZone(""), p.Destination.Port())
		from := netip.AddrPortFrom(p.Source.Unmap().WithZone(""), o.SourcePort)
		p.Source, p.Destination = from.Addr(), to
		o.Matches = append([]Match{{Protocol: p.Protocol, Origin: p.Origin, Source: from, Destination: to, Opening: true}}, o.Matches...)
	}
	return o
}

// Validate returns every invalid field.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...)))
	}
	if o.Limit < 0 || o.Limit > MaxLimit {
		bad("limit: %d packets: want at most %d", o.Limit, MaxLimit)
	}
	if o.Timeout < 0 || o.Timeout > MaxTimeout {
		bad("timeout: %v: want at most %v", o.Timeout, MaxTimeout)
	}
	if err := o.checkPacket(); err != nil {
		bad("packet: %v", err)
	}
	if o.Send && (o.Packet.Protocol == desired.SCTP || o.While != nil || o.SourcePort != 0) {
		bad("send: want TCP or UDP, and neither While nor SourcePort")
	}
	matches := o.withDefaults().Matches
	for i := range matches {
		if m := &matches[i]; m.Protocol == 0 || m.bits() == 0 || m.bits() != matches[0].bits() {
			bad("match %d: %v -> %v: want a protocol, and addresses that are all of the same IP family", i, m.Source, m.Destination)
		}
	}
	return errors.Join(errs...)
}

var errNoPacket = errors.New("missing: set it; Matches is enough without Send")

func (o *Options) checkPacket() error {
	switch {
	case o.Packet.Protocol != 0:
		return o.Packet.Validate()
	case o.Send || len(o.Matches) == 0:
		return errNoPacket
	default:
		return nil
	}
}

// bits returns the length of an address; 0 if there is none, or if they differ.
func (m *Match) bits() int {
	source, destination := m.Source.Addr().BitLen(), m.Destination.Addr().BitLen()
	if source != 0 && destination != 0 && source != destination {
		return 0
	}
	return max(source, destination)
}
