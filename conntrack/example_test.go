package conntrack_test

import (
	"context"
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/desired"
)

// A DNS Service had two endpoints, and one of them is deleted. A data plane of one's own deletes the flows to it;
// package proxier does so by Deps.Conntrack.
func ExampleNew() {
	tracking := conntrack.New(conntrack.Options{SCTP: true})
	clean := func(ctx context.Context) (deleted int, err error) { // it needs CAP_NET_ADMIN
		dns := desired.Key{VIP: netip.MustParseAddr("10.96.0.10"), Protocol: desired.UDP, Port: 53}
		stays := desired.EndpointsOf(netip.MustParseAddrPort("10.244.1.5:5353"))
		check := desired.NewFlowCheck(&desired.Globals{}, desired.Traits{}, desired.Flows{Key: dns, Serving: stays})
		return tracking.Clean(ctx, v1.IPv4Protocol, check)
	}
	_ = clean
	fmt.Println("UDP", tracking.Tracks(desired.UDP), "SCTP", tracking.Tracks(desired.SCTP), "TCP", tracking.Tracks(desired.TCP))
	// Output: UDP true SCTP true TCP false
}
