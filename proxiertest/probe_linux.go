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
	// answerTimeout is how long an answer may take on a busy machine, or a refusal. It
	// is waited out only when something is wrong. It has room for more SYNs, the second
	// a second after the first: in Linux, a TCP socket over IPv6 does not hear the port
	// unreachable that comes back while it is still being connected.
	answerTimeout = 30 * time.Second
	// refusalTimeout is when a datagram is sent again that has not been refused.
	refusalTimeout = 3 * time.Second
	// silence is how long nothing must come back to call a packet dropped.
	silence = 350 * time.Millisecond
	// minAsks is how many answers are looked at when one host may give them all,
	// maxAsks how many chances everyone has who should be seen to answer. With
	// three of them, one is missed in 64 fair draws with probability 1.6e-11.
	minAsks, maxAsks = 8, 64
)

// combo is one of the ways to dial everything: an IP family and a network.
type combo struct {
	family  v1.IPFamily
	network string
}

// String is "IPv4/TCP", for test names.
func (c combo) String() string { return string(c.family) + "/" + strings.ToUpper(c.network) }

// combos are those that a scenario is for.
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

// seat is a place in one IP family: a host and the address that it dials from.
type seat struct {
	host *Host
	addr netip.Addr
}

// seat finds a place; the address of nodeAnywhere is invalid.
func (s *stage) seat(at place, family v1.IPFamily) seat {
	world, second := s.world, 0
	if family == v1.IPv6Protocol {
		second = 1
	}
	switch at {
	case client:
		return seat{world.Client, world.Client.Addrs[second]}
	case otherClient:
		return seat{world.Client, world.Client.Addrs[2+second]}
	case node:
		return seat{world.Node, world.Node.Addrs[2+second]}
	case nodeMain:
		return seat{world.Node, world.Node.Addrs[second]}
	case nodeAsVIP:
		return seat{world.Node, localVIP(family)}
	case nodeAnywhere:
		return seat{host: world.Node}
	case router:
		return seat{world.Router, world.Router.Addrs[second]}
	case pod0, pod1, pod2:
		pod := world.LocalPods[at[len(at)-1]-'0']
		return seat{pod, pod.Addrs[second]}
	case remote0, remote1:
		pod := world.RemotePods[at[len(at)-1]-'0']
		return seat{pod, pod.Addrs[second]}
	}
	return seat{}
}

// ask dials once, with any network including icmp.
func (from seat) ask(ctx context.Context, network string, to netip.AddrPort, timeout time.Duration) (Answer, error) {
	opts := AskOptions{From: from.addr, Timeout: timeout}
	if network == "icmp" {
		return Answer{}, netns.Ping(ctx, from.host.ns, to.Addr(), opts)
	}
	return from.host.Ask(ctx, network, to, opts)
}

// attempt is a probe in one combo, ready to go.
type attempt struct {
	from    seat
	network string
	to      netip.AddrPort
	want    want
	world   *Topology
	// sourceLost says that endpoints see the node, whatever is wanted.
	sourceLost bool
}

// run returns nil if the packets fare as wanted.
func (a *attempt) run(ctx context.Context) error {
	switch a.want.outcome {
	case answered:
		return a.collect(ctx)
	case rejected:
		return a.fail(ctx, answerTimeout, ErrRefused)
	case dropped:
		return a.fail(ctx, silence, ErrTimeout, ErrDroppedLocally)
	case unanswered:
		return a.fail(ctx, silence, ErrTimeout, ErrDroppedLocally, ErrRefused, ErrUnreachable)
	}
	return a.faultf("no such outcome")
}

// fail asks once and wants one of the errors. A datagram is sent again where a refusal
// does not come, as TCP does with its SYN: a kernel limits how many it sends.
func (a *attempt) fail(ctx context.Context, timeout time.Duration, wanted ...error) error {
	again, first := a.want.outcome == rejected && a.network == "udp", timeout
	if again {
		first = refusalTimeout
	}
	answer, err := a.from.ask(ctx, a.network, a.to, first)
	if again && errors.Is(err, ErrTimeout) {
		answer, err = a.from.ask(ctx, a.network, a.to, timeout)
	}
	if err == nil {
		return a.faultf("answered by %s at %s", answer.Server, answer.Local)
	}
	if slices.ContainsFunc(wanted, func(target error) bool { return errors.Is(err, target) }) {
		return nil
	}
	return a.faultf("%v", err)
}

// collect asks until everyone who may answer has done so.
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

// judge looks at a single answer.
func (a *attempt) judge(answer Answer) error {
	if !slices.Contains(a.want.servers, place(answer.Server)) {
		return a.faultf("answered by %s at %s", answer.Server, answer.Local)
	}
	seen := answer.Source.Addr()
	source := a.want.source
	if source == kept && a.from.host.Name == answer.Server && answer.Local != a.to {
		source = masqueraded
	}
	if a.sourceLost && source != anySource && answer.Local != a.to {
		if !slices.Contains(a.world.Node.Addrs, seen) {
			return a.faultf("%s saw source %s, which is not the node's", answer.Server, seen)
		}
		return nil
	}
	switch source {
	case kept:
		if seen != a.from.addr {
			return a.faultf("%s saw source %s", answer.Server, seen)
		}
	case masqueraded:
		if seen == a.from.addr || !slices.Contains(a.world.Node.Addrs, seen) {
			return a.faultf("%s saw source %s, which is not a masqueraded one", answer.Server, seen)
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
