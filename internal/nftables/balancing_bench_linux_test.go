package nftables

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// BenchmarkBalancing measures what a weight costs, and what Services with a consistent hash do.
func BenchmarkBalancing(b *testing.B) {
	services, times := 1000, 30
	if os.Getenv(benchFull) == "1" {
		services, times = 10_000, 300
	}
	sized(b, services, 10, func(b *testing.B, c *cluster) {
		p := newBalanced(b, c, changetracker.Random)
		defer p.stop()
		b.Run("weight", func(b *testing.B) {
			versions := [2][]*discovery.EndpointSlice{{weighted(c.slices[7], 5)}, {weighted(c.slices[7], 4)}}
			p.measureVersions(b, versions, times).report(b)
		})
	})
	const hashedServices = 100
	for _, endpoints := range []int{10, 100} {
		sized(b, hashedServices, endpoints, func(b *testing.B, c *cluster) {
			before := liveHeap()
			p := newBalanced(b, c, changetracker.SourceHash)
			defer p.stop()
			b.Run("hashed", func(b *testing.B) {
				written := p.totals()
				f := figure{written: &written}
				f.report(b)
				b.ReportMetric(float64(liveHeap()-before)/hashedServices, "bytes/service")
			})
			b.Run("hashed/replaced=1", func(b *testing.B) { p.measureReplace(b, 1, times).report(b) })
		})
	}
}

// weighted returns a copy of a slice in which one endpoint has another weight.
func weighted(slice *discovery.EndpointSlice, weight int) *discovery.EndpointSlice {
	other := *slice
	other.Endpoints = slices.Clone(slice.Endpoints)
	other.Endpoints[4].Hostname = new(strconv.Itoa(weight))
	return &other
}

// newBalanced returns a Provider whose Services all have a policy.
func newBalanced(b *testing.B, c *cluster, policy changetracker.Balancing) *programmed {
	b.Helper()
	p := startConfigured(b, c, netnstest.New(b), proxier.Config{
		Runner: runner.Options{MinInterval: runner.Unlimited},
		Tracker: changetracker.ObjectOptions{
			DecorateService: func(p *changetracker.ServicePort, _ *v1.Service) { p.Balancing = policy },
			DecorateEndpoint: func(e *changetracker.Endpoint, api *discovery.Endpoint, _ *discovery.EndpointSlice) {
				if api.Hostname != nil {
					weight, err := strconv.Atoi(*api.Hostname)
					if err != nil {
						panic(fmt.Sprintf("weight: %v", err))
					}
					e.Weight = uint16(weight)
				}
			},
		},
	})
	p.load(b)
	return p
}
