package iptables_test

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// What iptables-restore would read about a Service, with kube-proxy's names. To plan
// needs no privilege and runs no program.
func ExampleNewEngine() {
	config := iptables.Config{Config: proxier.Config{Names: proxier.KubeProxyNames()}}
	engine, errEngine := iptables.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	tracker, errTracker := changetracker.New(changetracker.Options{})
	if errEngine != nil || errTracker != nil {
		fmt.Println(errEngine, errTracker)
		return
	}
	tracker.Services.Update(nil, proxiertest.Service("shop", "web",
		proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.1.5")), false)
	err := tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		state := delta.After
		update := desired.Update{Family: v1.IPv4Protocol, Full: true}
		for name := range state.All() {
			service, _ := new(desired.Resolver).Resolve(state, name)
			update.Changes = append(update.Changes, desired.Change{Name: name, After: service})
		}
		plan, err := engine.Abilities().Plan(update)
		for line := range strings.Lines(plan) {
			if strings.Contains(line, "shop/web:http") {
				fmt.Print(line)
			}
		}
		return nil, err
	})
	fmt.Println(err)
	// Output:
	// -A KUBE-SEP-34ZZ2QFGO32YYXXO -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.1.5:8080
	// -A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-67NZLRHBNDSAWJRO
	// -A KUBE-SVC-67NZLRHBNDSAWJRO -m comment --comment "shop/web:http -> 10.244.1.5:8080" -j KUBE-SEP-34ZZ2QFGO32YYXXO
	// <nil>
}
