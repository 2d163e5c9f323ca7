package packettrace

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nftrace"
)

// maxPackets bounds the packets of one connection that are followed: those of a failed one are
// fewer.
const maxPackets = 100

// ExplainTest returns a function for canary.Options.Explain, which names the rule that stops a failed test. netNS is canary.Options.NetNS.
//
// While the function runs there is a table more, for the packets of this
// connection only. Without the privilege CAP_NET_ADMIN, and on other systems than Linux, the
// function knows nothing.
func ExplainTest(netNS string) func(ctx context.Context, vip, endpoint netip.AddrPort, connect func(context.Context) error) string {
	return func(ctx context.Context, vip, endpoint netip.AddrPort, connect func(context.Context) error) string {
		connected := false
		options := nftrace.Options{
			NetNS: netNS, Limit: maxPackets, Timeout: nftrace.MaxTimeout,
			Matches: []nftrace.Match{
				{Protocol: desired.TCP, Origin: desired.FromNode, Destination: vip},
				{Protocol: desired.TCP, Origin: desired.FromNode, Source: endpoint},
			},
			While: func(ctx context.Context) error {
				err := connect(ctx)
				connected = err == nil
				return err
			},
		}
		result, err := nftrace.Trace(ctx, options)
		if err != nil || connected {
			return ""
		}
		return text(result.Packets, vip)
	}
}

// text says where the first packet ended that a rule or a policy stopped.
func text(packets []nftrace.TracedPacket, vip netip.AddrPort) string {
	untranslated := ""
	for i := range packets {
		p := &packets[i]
		if n := len(p.Steps); n > 0 && p.Steps[n-1].Ends() {
			return stopped(&p.Steps[n-1])
		}
		if n := len(p.Hops); n > 0 && p.Hops[n-1].Destination == vip && p.Hops[n-1].Hook == "postrouting" {
			untranslated = "no rule translates the VIP: the proxy's rules are gone or incomplete"
		}
	}
	return untranslated
}

func stopped(s *nftrace.MatchedRule) string {
	where := fmt.Sprintf("chain %s in table %s %s", s.Chain, s.Family, s.Table)
	if s.Policy {
		return fmt.Sprintf("stopped by the policy drop of %s: accept the packets there", where)
	}
	return fmt.Sprintf("stopped by the rule '%s' with handle %d of %s: see nft -a list chain %s %s %s", s.Rule, s.Handle, where, s.Family, s.Table, s.Chain)
}
