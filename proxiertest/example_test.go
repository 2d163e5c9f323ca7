package proxiertest_test

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// A program's own wiring is tested against what a data plane would be told.
func ExampleRecordingEngine() {
	engine := &proxiertest.RecordingEngine{}
	config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: changetracker.Node{Name: "node-1"}}
	p, err := proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		fmt.Println(err)
		return
	}
	p.OnServiceAdd(proxiertest.Service("default", "web",
		proxiertest.ClusterIPs("10.96.0.10"),
		proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080),
		proxiertest.ExternalPolicyLocal()))
	p.OnEndpointSliceAdd(proxiertest.Slice("default", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint("10.244.1.2", proxiertest.OnNode("node-1")),
		proxiertest.Endpoint("10.244.2.2", proxiertest.OnNode("node-2"))))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()

	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()
	fmt.Println("sync:", p.Sync(ctx))
	for name, service := range engine.Services() {
		for _, f := range service.Frontends {
			fmt.Println(name, f.Kind, service.Key(&f), "->", service.Endpoints(f.Scope))
		}
	}
	stop()
	fmt.Println("run:", <-ended)
	// Output:
	// sync: <nil>
	// default/web:http NodePort node port 30080/TCP -> [10.244.1.2:8080]
	// default/web:http ClusterIP 10.96.0.10:80/TCP -> [10.244.1.2:8080 10.244.2.2:8080]
	// run: <nil>
}
