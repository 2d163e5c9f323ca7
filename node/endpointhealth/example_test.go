package endpointhealth_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// A program checks the endpoints of the Services that ask for it by an annotation. One of three
// endpoints does not answer, and leaves.
func Example() {
	config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
		p.Ext = s.Annotations["example.net/check"] == "yes"
	}
	ask := endpointhealth.Func(func(_ context.Context, target endpointhealth.Target) error { // a question over UDP, for example
		if target.Addr.String() == "10.1.0.2:53" {
			return errors.New("no answer")
		}
		return nil
	})
	checker, err := endpointhealth.New(endpointhealth.Options{
		Choose: func(p *changetracker.ServicePort) (endpointhealth.CheckPolicy, bool, error) {
			asked, _ := changetracker.Ext[bool](p.Ext)
			return endpointhealth.CheckPolicy{Probe: ask, Interval: 20 * time.Millisecond, SlowStart: time.Minute}, asked, nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	deps := proxier.Deps{Observer: checker.Observer(nil)} // only userspace reports connections
	p, err := proxier.New(config, deps, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &proxiertest.RecordingEngine{}})
	if err != nil {
		fmt.Println(err)
		return
	}
	service := proxiertest.Service("default", "dns", proxiertest.ClusterIPs("10.96.0.53"), proxiertest.Port("dns", v1.ProtocolUDP, 53))
	service.Annotations = map[string]string{"example.net/check": "yes"}
	p.OnServiceAdd(service)
	p.OnEndpointSliceAdd(proxiertest.Slice("default", "dns", discovery.AddressTypeIPv4, proxiertest.SlicePort("dns", v1.ProtocolUDP, 53),
		proxiertest.Endpoint("10.1.0.1"), proxiertest.Endpoint("10.1.0.2"), proxiertest.Endpoint("10.1.0.3")))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()

	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	running.Go(func() { _ = checker.Run(ctx, p) })
	poll.Soon(func() bool { return checker.Status().Ejected > 0 })
	_ = p.Sync(ctx)
	for _, e := range p.Programmed(v1.IPv4Protocol).Endpoints(checker.Status().Unusual[0].Name) {
		fmt.Println(e.String())
	}
	fmt.Println(checker.Status().Unusual[0].Reason)
	stop()
	running.Wait()
	// Output:
	// 10.1.0.1:53
	// 10.1.0.2:53 ejected
	// 10.1.0.3:53
	// no answer
}
