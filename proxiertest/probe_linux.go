package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
)

const (
	// answerTimeout limits the wait for an answer or a refusal on a busy machine. It
	// passes only if a test fails. It has room for repeated SYNs: on Linux, a TCP socket
	// over IPv6 ignores a port unreachable that arrives while connect is in progress.
	answerTimeout = 30 * time.Second
	// refusalTimeout is the wait before a datagram that was not refused is sent again.
	refusalTimeout = 3 * time.Second
	// silence is the time without a reply after which a datagram counts as dropped that a process
	// may have taken to pass it on. Topology.Flush knows only what the kernel does.
	silence = 350 * time.Millisecond
	// minAsks is the number of answers to check if one host may give all of them, maxAsks
	// the number of attempts until all servers must have answered. Of three servers, 64
	// fair draws miss one with probability 1.6e-11.
	minAsks, maxAsks = 8, 64
)

// combo is an IP family and a network to dial.
type combo struct {
	family  v1.IPFamily
	network string
}

// String returns "IPv4/TCP", for test names.
func (c combo) String() string { return string(c.family) + "/" + strings.ToUpper(c.network) }

// combos returns the combinations of both families with TCP and UDP.
func combos() []combo { return (&scenario{}).combos() }

// combos returns the combinations of the scenario's families and networks.
func (sc *scenario) combos() []combo {
	in, networks := sc.families, sc.networks
	if in == nil {
		in = families()
	}
	if networks == nil {
		networks = []string{"tcp", "udp"}
	}
	var all []combo
	for _, family := range in {
		for _, network := range networks {
			all = append(all, combo{family, network})
		}
	}
	return all
}

// sender is a place in one IP family: a host and its source address.
type sender struct {
	host *Host
	addr netip.Addr
}

// sender returns the sender of a place. That of nodeAnywhere has no address.
func (s *stage) sender(at place, family v1.IPFamily) sender {
	world := s.world
	switch at {
	case client:
		return world.Client.sender(0, family)
	case otherClient:
		return world.Client.sender(1, family)
	case node:
		return world.Node.sender(1, family)
	case nodeMain:
		return world.Node.sender(0, family)
	case nodeAsVIP:
		return sender{world.Node, localVIP(family)}
	case nodeAnywhere:
		return sender{host: world.Node}
	case router:
		return world.Router.sender(0, family)
	case pod0, pod1, pod2:
		return world.LocalPods[at[len(at)-1]-'0'].sender(0, family)
	case remote0, remote1:
		return world.RemotePods[at[len(at)-1]-'0'].sender(0, family)
	}
	return sender{}
}

// sender returns the n-th sender of a host, whose addresses come in pairs.
func (h *Host) sender(n int, family v1.IPFamily) sender {
	return sender{h, h.Addrs[2*n+either(family, 0, 1)]}
}

// ask dials once. The network can also be icmp.
func (from sender) ask(ctx context.Context, network string, to netip.AddrPort, timeout time.Duration) (Answer, error) {
	return from.askWith(ctx, network, to, AskOptions{Timeout: timeout})
}

func (from sender) askWith(ctx context.Context, network string, to netip.AddrPort, opts AskOptions) (Answer, error) {
	opts.From = from.addr
	if network == "icmp" {
		return Answer{}, netns.Ping(ctx, from.host.ns, to.Addr(), netns.AskOptions(opts))
	}
	return from.host.Ask(ctx, network, to, opts)
}

// attempt is a probe in one combo.
type attempt struct {
	from     sender
	network  string
	to       netip.AddrPort
	want     want
	world    *Topology
	features Features // of the data plane
}

// run returns nil if the packets have the wanted outcome.
func (a *attempt) run(ctx context.Context) error {
	switch a.want.outcome {
	case answered:
		return a.collect(ctx)
	case rejected:
		return a.refuse(ctx)
	case dropped:
		return a.fail(ctx, a.unheard(), ErrTimeout, ErrDroppedLocally)
	case unanswered:
		return a.fail(ctx, a.unheard(), ErrTimeout, ErrDroppedLocally, ErrRefused, ErrUnreachable)
	}
	return a.faultf("unknown outcome")
}

func (a *attempt) unheard() AskOptions {
	return AskOptions{Timeout: answerTimeout, Flusher: a.world.flusher(&a.features, a.network)}
}

// flusher returns what shows that a packet got no answer.
func (t *Topology) flusher(f *Features, network string) netns.Flusher {
	if !f.SourceLost || network != "udp" {
		return t
	}
	return relayed{t}
}

// relayed is for datagrams that a process may have to pass on.
type relayed struct{ *Topology }

func (r relayed) Flush(ctx context.Context) error {
	if err := r.Topology.Flush(ctx); err != nil {
		return err
	}
	select {
	case <-time.After(silence):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// refuse wants a refusal. A datagram without one is sent again, as TCP repeats its SYN: the kernel
// limits its ICMP messages.
func (a *attempt) refuse(ctx context.Context) error {
	if a.network == "udp" {
		if answer, err := a.from.ask(ctx, a.network, a.to, refusalTimeout); !errors.Is(err, ErrTimeout) {
			return a.check(answer, err, ErrRefused)
		}
	}
	return a.fail(ctx, AskOptions{Timeout: answerTimeout}, ErrRefused)
}

// fail asks once, and wants one of the errors.
func (a *attempt) fail(ctx context.Context, opts AskOptions, wanted ...error) error {
	answer, err := a.from.askWith(ctx, a.network, a.to, opts)
	return a.check(answer, err, wanted...)
}

func (a *attempt) check(answer Answer, err error, wanted ...error) error {
	if err == nil {
		return a.faultf("answered by %s at %s", answer.Server, answer.Local)
	}
	if slices.ContainsFunc(wanted, func(target error) bool { return errors.Is(err, target) }) {
		return nil
	}
	return a.faultf("%v", err)
}

// collect asks until every server has answered.
func (a *attempt) collect(ctx context.Context) error {
	seen := map[string]int{}
	for n := 1; n <= maxAsks; n++ {
		answer, err := a.from.ask(ctx, a.network, a.to, answerTimeout)
		if err != nil {
			return a.faultf("attempt %d: %v", n, err)
		}
		if err := a.judge(answer); err != nil {
			return err
		}
		seen[answer.Server]++
		if n >= minAsks && len(seen) == len(a.want.servers) {
			return nil
		}
	}
	return a.faultf("only %v answered in %d attempts", seen, maxAsks)
}

// mayKeepSource is whether a socket may have been translated, which rules would masquerade.
func (a *attempt) mayKeepSource(hairpin bool) bool {
	return a.features.isBySocket(a.network) && slices.Contains(a.world.LocalPods, a.from.host) && (a.features.PodsKeepSource || hairpin)
}

// judge checks one answer.
func (a *attempt) judge(answer Answer) error {
	if !slices.Contains(a.want.servers, place(answer.Server)) {
		return a.faultf("answered by %s at %s", answer.Server, answer.Local)
	}
	seen := answer.Source.Addr()
	source := a.want.source
	hairpin := a.from.host.Name == answer.Server && answer.Local != a.to
	switch {
	case seen == a.from.addr && a.mayKeepSource(hairpin):
		return nil
	case source == kept && hairpin:
		source = masqueraded
	}
	if a.features.SourceLost && source != anySource && answer.Local != a.to {
		if !slices.Contains(a.world.Node.Addrs, seen) {
			return a.faultf("%s saw source %s, which is not the node's", answer.Server, seen)
		}
		return nil
	}
	return a.judgeSource(source, answer)
}

func (a *attempt) judgeSource(source source, answer Answer) error {
	seen := answer.Source.Addr()
	switch source {
	case kept:
		if seen != a.from.addr {
			return a.faultf("%s saw source %s", answer.Server, seen)
		}
	case masqueraded:
		if seen == a.from.addr || !slices.Contains(a.world.Node.Addrs, seen) {
			return a.faultf("%s saw source %s, which is not masqueraded", answer.Server, seen)
		}
	case anySource:
	}
	return nil
}

func (a *attempt) faultf(format string, args ...any) error {
	expected := string(a.want.outcome)
	if a.want.outcome == answered {
		expected = fmt.Sprintf("answered by each of %v, source %s", a.want.servers, a.want.source)
	}
	from := a.from.host.Name
	if a.from.addr.IsValid() {
		from += " " + a.from.addr.String()
	}
	return fmt.Errorf("%s -> %s %s: got: %s, want: %s", from, a.network, a.to, fmt.Sprintf(format, args...), expected)
}
