package flows_test

import (
	"fmt"
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/flows"
)

// A DNS Service had two endpoints, and one of them was deleted. The flows to it are stale.
func ExampleJudge() {
	vip, node := netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("192.0.2.10")
	stays, gone := netip.MustParseAddrPort("10.244.1.5:5353"), netip.MustParseAddrPort("10.244.2.7:5353")
	globals := desired.Globals{NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}}
	check := desired.NewFlowCheck(&globals, desired.Traits{}, // for a desired.Service, desired.FlowsOf has what follows
		desired.Flows{Key: desired.Key{VIP: vip, Protocol: desired.UDP, Port: 53}, Serving: desired.EndpointsOf(stays)},
		desired.Flows{Key: desired.Key{Protocol: desired.UDP, Port: 30053}, Serving: desired.EndpointsOf(stays)}) // a node port
	judge := flows.NewJudge(check, []netip.Addr{node})
	for _, flow := range []flows.Flow{
		{Dialled: netip.AddrPortFrom(vip, 53), Server: stays},
		{Dialled: netip.AddrPortFrom(vip, 53), Server: gone},
		{Dialled: netip.AddrPortFrom(node, 30053), Server: gone},
		{Dialled: netip.AddrPortFrom(vip, 53), Server: netip.AddrPortFrom(vip, 53)}, // from before there were endpoints
		{Dialled: netip.MustParseAddrPort("192.0.2.99:53"), Server: gone},           // not of a Service
	} {
		flow.Protocol = desired.UDP
		fmt.Printf("%v served by %v: stale is %v\n", flow.Dialled, flow.Server, judge.Stale(flow))
	}
	// Output:
	// 10.96.0.10:53 served by 10.244.1.5:5353: stale is false
	// 10.96.0.10:53 served by 10.244.2.7:5353: stale is true
	// 192.0.2.10:30053 served by 10.244.2.7:5353: stale is true
	// 10.96.0.10:53 served by 10.96.0.10:53: stale is true
	// 192.0.2.99:53 served by 10.244.2.7:5353: stale is false
}
