package conntrack

import (
	"context"
	"hash/maphash"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// OpenConnections returns a function that lists what connection tracking knows to be open, as package leastconnections
// needs it: TCP connections that not both sides have closed, and all flows of other protocols, of those whose destination
// a rule has translated. netNS is as in proxier.Config. The function calls each with a number that only that connection
// has and that stays the same, and with the endpoint. One that opens or ends meanwhile may be missing. Several goroutines
// may call the function at once.
func OpenConnections(netNS string) func(ctx context.Context, family v1.IPFamily, each func(id uint64, protocol v1.Protocol, server netip.AddrPort)) error {
	seed := maphash.MakeSeed()
	return func(ctx context.Context, family v1.IPFamily, each func(id uint64, protocol v1.Protocol, server netip.AddrPort)) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		s, err := netlinkx.Open(netNS)
		if err != nil {
			return classify(err)
		}
		defer s.Close()
		return classify(netlinkx.ListFlows(ctx, s, uint8(number(family)), func(f *netlinkx.Flow) {
			if f.Translated && f.TCPState <= tcpCloseWait {
				each(f.Hash(seed), v1.Protocol(desired.Protocol(f.Protocol).String()), f.Server)
			}
		}))
	}
}

// tcpCloseWait is TCP_CONNTRACK_CLOSE_WAIT of linux/netfilter/nf_conntrack_tcp.h. In later states both sides have closed.
const tcpCloseWait = 5
