package leastconnections_test

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/leastconnections"
	"github.com/serviceplane/serviceplane/proxier"
)

// A program whose Services say by an annotation that they want the policy.
func Example() {
	config := nftables.Config{Config: proxier.Config{LeastConnections: true}}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
		if s.Annotations["example.com/balancing"] == "least-connections" {
			p.Balancing = changetracker.LeastConnections
		}
	}
	balancer, err := leastconnections.New(leastconnections.Options{List: conntrack.OpenConnections("")})
	if err != nil {
		panic(err)
	}
	run := func(ctx context.Context) error { // as root, on Linux
		provider, err := nftables.New(config, proxier.Deps{})
		if err != nil {
			return err
		}
		go func() { _ = balancer.Run(ctx, provider) }()
		return provider.Run(ctx)
	}
	_ = run
	fmt.Println(balancer.Readings().Ports, "service ports")
	// Output: 0 service ports
}
