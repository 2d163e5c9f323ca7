package packettrace_test

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/canary"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/packettrace"
	"github.com/serviceplane/serviceplane/proxier"
)

// The debug page of a Proxier, whose clients may follow packets. Serve it only to administrators.
func ExampleNew() {
	var p *proxier.Proxier // nftables.New returns it
	names := proxier.KubeProxyNames()
	http.Handle("/debug/", http.StripPrefix("/debug", debughttp.Handler(p, debughttp.WithTracer(packettrace.New(p.Explain, names, "")))))
}

// A tool follows one packet. An invalid packet is refused before anything is written.
func ExampleNew_tool() {
	explain := func(context.Context, desired.Packet) (e desired.Explanation, err error) { return e, nil }
	_, err := packettrace.New(explain, proxier.KubeProxyNames(), "")(context.Background(), debughttp.TraceRequest{Packets: 1, Timeout: time.Second})
	fmt.Println(err != nil)
	// Output: true
}

// When connections of the canary fail, its status and its log name the rule that stops them.
func ExampleExplainTest() {
	_, err := canary.New(canary.Options{Explain: packettrace.ExplainTest("")})
	fmt.Println(err)
	// Output: <nil>
}
