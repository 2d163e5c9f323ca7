package conntrack

import (
	"context"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// ReportConnections tells how TCP connections through Services went, by the notifications of the
// kernel about conntrack entries that end, until ctx ends; then it returns nil. netNS is as in
// proxier.Config. It calls report, for example Checker.Report of package endpointhealth, with
// nil if the endpoint answered, and otherwise with ErrUnanswered. report must return soon. Calls
// do not overlap.
//
// It reports all connections whose destination a rule has translated. The entry of a refused
// connection ends at once. The entry of an unanswered connection ends 2 minutes after the client's
// last attempt (net.netfilter.nf_conntrack_tcp_timeout_syn_sent), and the entry of a successful
// connection as long after its end (…_time_wait). So it is slower than checks. Without net.netfilter.nf_conntrack_events the
// kernel sends nothing. Under load, notifications may be lost.
func ReportConnections(ctx context.Context, netNS string, report func(endpoint netip.AddrPort, protocol v1.Protocol, err error)) error {
	return classify(netlinkx.WatchEnded(ctx, netNS, func(f *netlinkx.Flow) {
		if desired.Protocol(f.Protocol) != desired.TCP || !f.Translated {
			return
		}
		if f.Answered {
			report(f.Server, v1.ProtocolTCP, nil)
			return
		}
		report(f.Server, v1.ProtocolTCP, ErrUnanswered)
	}))
}
