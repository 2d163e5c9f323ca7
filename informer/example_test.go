package informer_test

import (
	"context"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// web returns the Service of the API server.
func web() *v1.Service {
	return proxiertest.Service("default", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80))
}

// newProvider takes the place of nftables.New.
func newProvider() (*proxier.Proxier, *proxiertest.RecordingEngine) {
	engine := &proxiertest.RecordingEngine{}
	p, err := proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}, proxier.Deps{},
		map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		panic(err)
	}
	return p, engine
}

// show waits until something is programmed, and prints it.
func show(ctx context.Context, p *proxier.Proxier, engine *proxiertest.RecordingEngine) {
	for ctx.Err() == nil && len(engine.Services()) == 0 {
		if err := p.Sync(ctx); err != nil {
			return
		}
	}
	for name, s := range engine.Services() {
		fmt.Println(name, s.Key(&s.Frontends[0]))
	}
}

// Run creates informers.
func ExampleRun() {
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	config, err := rest.InClusterConfig()
	if err != nil {
		fmt.Println(err)
		return
	}
	p, _ := newProvider()

	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	running.Go(func() { _ = informer.Run(ctx, config, p, informer.Options{}) })
	running.Wait()
}

// Bind uses the informers of the program.
func ExampleBind() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	factory := informers.NewSharedInformerFactory(fake.NewClientset(web()), 0)
	p, engine := newProvider()

	stop, err := informer.Bind(informer.Informers{
		Services:       factory.Core().V1().Services().Informer(),
		EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
		ServiceCIDRs:   factory.Networking().V1().ServiceCIDRs().Informer(),
	}, p, informer.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	factory.Start(ctx.Done())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	show(ctx, p, engine)
	cancel()
	running.Wait()
	factory.Shutdown()
	// Output: default/web:http 10.96.0.10:80/TCP
}
