package packettrace_test

import (
	"fmt"
	"net/netip"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/packettrace"
	"github.com/serviceplane/serviceplane/proxier"
)

// A tool follows a packet to a ClusterIP, and asks whether the packet fared as Explain says. Here, a firewall
// dropped it.
func ExampleCompare() {
	// result, err := packettrace.Trace(ctx, packettrace.Options{Packet: packet, Send: true})
	client, vip := netip.MustParseAddrPort("10.244.1.9:40000"), netip.MustParseAddrPort("10.96.0.10:80")
	result := packettrace.TraceResult{Packets: []packettrace.TracedPacket{{
		Hops:  []packettrace.Hop{{Hook: "prerouting", Source: client, Destination: vip}},
		Steps: []packettrace.MatchedRule{{Family: "inet", Table: "firewall", Chain: "raw", Hook: "prerouting", Priority: -300, Handle: 7, Rule: "ip daddr 10.96.0.0/16 drop", Verdict: "drop"}},
	}}}
	explanation := desired.Explanation{Verdict: desired.VerdictForward, Endpoints: []desired.ExplainedEndpoint{{Endpoint: changetracker.Endpoint{Addr: netip.MustParseAddrPort("10.244.2.7:8080")}}}}
	judgement := packettrace.Compare(&result, &explanation, proxier.KubeProxyNames())
	fmt.Println(judgement.By)
	fmt.Println("as explained:", judgement.Agrees)
	// Output:
	// dropped by rule 'ip daddr 10.96.0.0/16 drop' (handle 7) of chain raw in table inet firewall: not a rule of this proxy
	// as explained: false
}
