package userspace_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/userspace"
)

func hello(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello from the pod") }

// sliceOf returns an EndpointSlice with one endpoint.
func sliceOf(pod *httptest.Server) *discovery.EndpointSlice {
	at := netip.MustParseAddrPort(pod.Listener.Addr().String())
	return proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, int32(at.Port())), proxiertest.Endpoint(at.Addr().String()))
}

// Scale from zero: the first client's connection starts the endpoint, and waits for it.
func Example() {
	pod := httptest.NewServer(http.HandlerFunc(hello))
	defer pod.Close()
	var p *proxier.Proxier
	config := userspace.Config{Config: proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}}
	config.Tracker.LoopbackEndpoints = true // this example's endpoint is on loopback
	config.Hooks.Activate = func(_ context.Context, name changetracker.ServicePortName) {
		fmt.Println("activate", name)
		p.OnEndpointSliceAdd(sliceOf(pod))
	}
	engine, err := userspace.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	if err == nil {
		p, err = proxier.New(config.Config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	p.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	fmt.Println("sync:", p.Sync(ctx))

	// With portals, clients of the VIP would connect to this socket.
	response, err := pod.Client().Get("http://" + engine.Sockets()[0].Addr.String())
	if err == nil {
		answer, _ := io.ReadAll(response.Body)
		fmt.Printf("%s\n", answer)
		_ = response.Body.Close()
	}
	stop()
	fmt.Println("run:", <-ended, err)
	// Output:
	// sync: <nil>
	// activate shop/web:http
	// hello from the pod
	// run: <nil> <nil>
}
