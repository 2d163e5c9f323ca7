// Package packettrace follows real packets through the rules of nf_tables on a node: through the
// tables of all programs, also those of iptables-nft. It answers which rule ended the way of a
// packet, and whether that is what Explain says.
//
//	debughttp.Handler(p, debughttp.WithTracer(packettrace.New(p.Explain, names, netNS)))
//	canary.New(canary.Options{Explain: packettrace.ExplainTest("")})
//
// While it follows a packet, the node has one table more, which accepts everything; it ends with the
// process at the latest (since Linux 5.12; before, with the next trace). Packets that do not match
// have no other way than before.
//
// Rules of iptables-legacy, BPF programs, routing and chains of the families netdev and bridge are not
// seen. If a packet is lost there, the answer says after which point, and what may have done it.
// Engine userspace ends connections at its own sockets: it has no traces.
//
// It needs Linux and the privilege CAP_NET_ADMIN in the network namespace.
package packettrace

import (
	"cmp"
	"context"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nftrace"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxier"
)

// New returns a function for debughttp.WithTracer, which also a tool may call. explain is
// proxier.Proxier.Explain. names and netNS are those of its Config: names tell its rules from others, and packets are
// followed in the network namespace. Several goroutines may call the function at once.
func New(explain func(context.Context, desired.Packet) (desired.Explanation, error), names proxier.Names, netNS string) func(context.Context, debughttp.TraceRequest) (debughttp.TraceAnswer, error) {
	return func(ctx context.Context, r debughttp.TraceRequest) (a debughttp.TraceAnswer, err error) {
		result, err := nftrace.Trace(ctx, nftrace.Options{
			NetNS: netNS, Packet: r.Packet, Limit: r.Packets, Timeout: r.Timeout, Send: r.Send, SendFrom: cmp.Or(r.NetNS, netNS),
		})
		if err != nil {
			return a, err
		}
		if a.Explanation, err = explain(ctx, r.Packet); err != nil {
			return a, err
		}
		j := nftrace.Compare(&result, &a.Explanation, names)
		a.Verdict, a.By, a.Reasons, a.Agrees, a.Sent = j.Outcome.String(), j.By, j.Reasons, j.Agrees, result.Sent
		if j.Packet == nil {
			return a, nil
		}
		for i := range j.Packet.Steps {
			s := &j.Packet.Steps[i]
			a.Steps = append(a.Steps, debughttp.TraceStep{
				Family: s.Family, Table: s.Table, Chain: s.Chain, Hook: s.Hook, Rule: s.Rule, Comment: s.Comment,
				Handle: s.Handle, Command: s.Command, Verdict: s.Verdict, Ours: nftrace.Ours(s, names),
			})
		}
		return a, nil
	}
}
