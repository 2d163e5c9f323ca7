package proxier_test

import (
	"context"
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// printer is an Engine that prints service ports. It fails once if it is busy.
type printer struct{ busy bool }

func (p *printer) Apply(_ context.Context, update desired.Update) (proxier.Result, error) {
	if p.busy {
		p.busy = false
		return proxier.Result{}, errors.New("the printer is busy")
	}
	for s := range update.Services() {
		for _, f := range s.Frontends {
			fmt.Println(s.Name, s.Key(&f), f.Action, s.Endpoints(f.Scope))
		}
	}
	return proxier.Result{}, nil
}

func (p *printer) Cleanup(context.Context) error { return nil }

func (p *printer) Close() error { return nil }

func (p *printer) Traits(*desired.Service) desired.Traits { return desired.Traits{} }
func (printer) Abilities() proxier.Abilities              { return proxier.Abilities{} }

// listener is an Observer that calls a function.
type listener func(proxier.SyncReport)

func (l listener) ObserveSync(r proxier.SyncReport) { l(r) }

// An Engine only programs its data plane. The Proxier tracks events, decides what Services
// mean, and retries failures without losing changes.
func Example() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}
	deps := proxier.Deps{Observer: listener(func(r proxier.SyncReport) {
		fmt.Println("sync:", r.Err)
		if r.Err == nil {
			stop() // a program would go on
		}
	})}
	p, err := proxier.New(config, deps, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &printer{busy: true}})
	if err != nil {
		fmt.Println(err)
		return
	}
	p.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080)))
	p.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.1.5")))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	fmt.Println("run:", p.Run(ctx))
	fmt.Println("service ports:", p.Status().Families[v1.IPv4Protocol].ServicePorts)
	// Output:
	// sync: IPv4: the printer is busy
	// shop/web:http node port 30080/TCP forward [10.244.1.5:8080]
	// shop/web:http 10.96.0.10:80/TCP forward [10.244.1.5:8080]
	// sync: <nil>
	// run: <nil>
	// service ports: 1
}
