package ipvs_test

import (
	"fmt"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// An annotation of a Service chooses its scheduler, and one endpoint gets more connections
// than the others. Plan needs no privilege.
func ExampleConfig_tune() {
	config := ipvs.Config{}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) { p.Ext = s.Annotations["example.com/scheduler"] }
	config.Tracker.DecorateEndpoint = func(e *changetracker.Endpoint, _ *discovery.Endpoint, _ *discovery.EndpointSlice) {
		if e.Addr.Addr() == netip.MustParseAddr("10.244.2.7") {
			e.Weight = 3
		}
	}
	config.Choose = func(s *desired.Service) ipvs.Tuning {
		scheduler, _ := changetracker.Ext[string](s.Port.Ext)
		return ipvs.Tuning{Scheduler: scheduler}
	}
	engine, errEngine := ipvs.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	tracker, errTracker := changetracker.New(changetracker.Options{ObjectOptions: config.Tracker})
	if errEngine != nil || errTracker != nil {
		fmt.Println(errEngine, errTracker)
		return
	}
	web := proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80))
	web.Annotations = map[string]string{"example.com/scheduler": "sed"}
	tracker.Services.Update(nil, web)
	tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.1.5"), proxiertest.Endpoint("10.244.2.7")), false)
	err := tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		state := delta.After
		update := desired.Update{Family: v1.IPv4Protocol, Full: true}
		for name := range state.All() {
			service, _ := new(desired.Resolver).Resolve(state, name)
			update.Changes = append(update.Changes, desired.Change{Name: name, After: service})
		}
		plan, err := engine.Abilities().Plan(update)
		servers, _, _ := strings.Cut(plan, "\n\n") // the rules follow
		fmt.Println(servers)
		return nil, err
	})
	fmt.Println(err)
	// Output:
	// 10.96.0.10:80/TCP sed
	//   -> 10.244.1.5:8080 weight 1
	//   -> 10.244.2.7:8080 weight 3
	// <nil>
}
