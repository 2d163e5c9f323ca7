package proxiertest

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nftrace"
	"github.com/serviceplane/serviceplane/proxier"
)

const (
	// tracesAtOnce is small because each trace receives the events of all of them.
	tracesAtOnce  = 4
	tracesInRound = 40
)

// Traces is Explanations, but follows each packet through the rules with nftrace.Trace, and
// expects that its judgement agrees with Explain. The Providers of the factory use the names,
// and rules of nf_tables.
func Traces(t *testing.T, packets int, seed uint64, names proxier.Names, factory Factory) {
	t.Helper()
	x := &explanations{atOnce: tracesAtOnce, inRound: tracesInRound, check: func(s *trial, ctx context.Context, e *desired.Explanation) error {
		return s.trace(ctx, e, names)
	}}
	x.run(t, packets, seed, factory)
}

// trace sends the packet, and judges its way.
func (s *trial) trace(ctx context.Context, e *desired.Explanation, names proxier.Names) error {
	result, err := nftrace.Trace(ctx, nftrace.Options{
		NetNS: s.world.Node.NetNS(), Packet: s.packet, Send: true, SendFrom: s.from.host.NetNS(), Timeout: answerTimeout,
	})
	if err != nil {
		return err
	}
	to := s.packet.Destination.Addr()
	passesBy := s.at == remote0 && (to == cloudVIP(v1.IPv4Protocol) || to == cloudVIP(v1.IPv6Protocol)) // the router has it
	if j := nftrace.Compare(&result, e, names); !j.Agrees && (!passesBy || j.Outcome != nftrace.OutcomeUnseen) {
		text, _ := json.Marshal(result)
		return fmt.Errorf("%s of %s %v -> %v: %v, %s, %q\nexplained as %v %v: %q\nendpoints %v\n%s", s.network, s.at, s.packet.Source,
			s.packet.Destination, j.Outcome, j.By, j.Reasons, e.Verdict, e.Service, e.Reasons, e.Endpoints, text)
	}
	return nil
}
