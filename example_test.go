package serviceplane_test

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// Events go in, and the engine is told what each Service means. A RecordingEngine keeps
// that for the test; with nftables.New in place of proxier.New, it is in the kernel.
func Example() {
	engine := &proxiertest.RecordingEngine{}
	config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}
	p, err := proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		fmt.Println(err)
		return
	}
	// An informer calls these.
	p.OnServiceAdd(proxiertest.Service("shop", "web",
		proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	p.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.1.5")))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()

	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()
	fmt.Println("sync:", p.Sync(ctx))
	for name, s := range engine.Services() {
		for _, f := range s.Frontends {
			fmt.Println(name, s.Key(&f), f.Action, s.Endpoints(f.Scope))
		}
	}
	stop()
	fmt.Println("run:", <-ended)
	// Output:
	// sync: <nil>
	// shop/web:http 10.96.0.10:80/TCP forward [10.244.1.5:8080]
	// run: <nil>
}
