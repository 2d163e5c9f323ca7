package nodeproxy

import (
	"context"
	"slices"

	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/packettrace"
)

// socketOptions adds to the options of the debug handler at the socket: its clients may follow
// packets through the rules of the node. Mode userspace ends connections at its own sockets, which a
// trace cannot follow.
func (o *options) socketOptions(p *testedProxy, list []debughttp.Option) []debughttp.Option {
	if o.mode() == modeUserspace {
		return list
	}
	names := o.names(new(faults)) // checked before
	return append(slices.Clip(list), debughttp.WithTracer(func(ctx context.Context, r debughttp.TraceRequest) (a debughttp.TraceAnswer, err error) {
		result, err := packettrace.Trace(ctx, packettrace.Options{
			Packet: r.Packet, Limit: r.Packets, Timeout: r.Timeout, Send: r.Send, SendFrom: r.NetNS,
		})
		if err != nil {
			return a, err
		}
		if a.Explanation, err = p.Explain(ctx, r.Packet); err != nil {
			return a, err
		}
		j := packettrace.Compare(&result, &a.Explanation, names)
		a.Verdict, a.By, a.Reasons, a.Agrees, a.Sent = j.Outcome.String(), j.By, j.Reasons, j.Agrees, result.Sent
		if j.Packet == nil {
			return a, nil
		}
		for i := range j.Packet.Steps {
			s := &j.Packet.Steps[i]
			a.Steps = append(a.Steps, debughttp.TraceStep{
				Family: s.Family, Table: s.Table, Chain: s.Chain, Hook: s.Hook, Rule: s.Rule, Comment: s.Comment,
				Handle: s.Handle, Command: s.Command, Verdict: s.Verdict, Ours: packettrace.Ours(s, names),
			})
		}
		return a, nil
	}))
}
