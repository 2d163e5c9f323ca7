package userspace_test

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace"
)

// BenchmarkTargets measures Apply: "loopback" without portals, in this process's network
// namespace, and "portals" with nftables in a new namespace.
//
// Budgets: the first sync 0.2 s for 1,000 Services and 1 s for 5,000, without portals;
// one endpoint replaced 1 ms and 500 allocations, and 100 endpoints 10 ms, at any size.
func BenchmarkTargets(b *testing.B) {
	const endpoints = 10
	sizes := []int{100, 1000}
	if os.Getenv("SERVICEPLANE_BENCH_FULL") == "1" {
		sizes = []int{1000, 5000}
	}
	for _, n := range sizes {
		services := benchServices(n, endpoints)
		b.Run(fmt.Sprintf("loopback/N=%d/E=%d", n, endpoints), func(b *testing.B) {
			benchSyncs(b, services, func(testing.TB) userspace.Config { return userspace.Config{} })
		})
		b.Run(fmt.Sprintf("portals/N=%d/E=%d", n, endpoints), func(b *testing.B) {
			benchSyncs(b, services, portalConfig)
		})
	}
}

// portalConfig configures an engine with portals in a new namespace.
func portalConfig(tb testing.TB) userspace.Config {
	tb.Helper()
	config := proxier.Config{NetNS: netnstest.New(tb).Path()}
	return userspace.Config{
		Config: config, Listen: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
		Portals: func(family v1.IPFamily) (proxier.Engine, error) {
			return nftables.NewEngine(nftables.Config{Config: config}, family, proxier.Deps{})
		},
	}
}

func benchSyncs(b *testing.B, services []*desired.Service, config func(testing.TB) userspace.Config) {
	everything := desired.ChangesTo(services...)
	b.Run("first", func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			b.StopTimer()
			e := syncEngine(b, config(b))
			b.StartTimer()
			syncNow(b, e, desired.Update{Full: true, Changes: everything})
			b.StopTimer()
			closeEngine(b, e)
			b.StartTimer()
		}
		reportMilliseconds(b)
	})
	e := syncEngine(b, config(b))
	defer closeEngine(b, e)
	syncNow(b, e, desired.Update{Full: true, Changes: everything})
	b.Run("full", func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			syncNow(b, e, desired.Update{Full: true, Changes: everything})
		}
		reportMilliseconds(b)
	})
	for _, n := range []int{1, 100} {
		b.Run(fmt.Sprintf("replaced=%d", n), func(b *testing.B) {
			versions := [2][]desired.Change{} // there and back
			for i := range n {
				s := services[i*37%len(services)]
				other := withOther(s, i)
				versions[0] = append(versions[0], desired.Change{Name: s.Name, After: other})
				versions[1] = append(versions[1], desired.Change{Name: s.Name, After: s})
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				syncNow(b, e, desired.Update{Changes: versions[i%2]})
			}
			reportMilliseconds(b)
		})
	}
}

func syncEngine(b *testing.B, config userspace.Config) *userspace.Engine {
	b.Helper()
	e, err := userspace.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		b.Fatal(err)
	}
	return e
}

func syncNow(b *testing.B, e *userspace.Engine, u desired.Update) {
	b.Helper()
	u.Family = v1.IPv4Protocol
	if _, err := e.Apply(b.Context(), u); err != nil {
		b.Fatalf("apply: %v", err)
	}
}

func closeEngine(b *testing.B, e *userspace.Engine) {
	b.Helper()
	if err := e.Close(); err != nil {
		b.Errorf("close: %v", err)
	}
}

func reportMilliseconds(b *testing.B) {
	b.Helper()
	b.StopTimer()
	b.ReportMetric(float64(b.Elapsed().Microseconds())/1000/float64(b.N), "ms")
	b.ReportMetric(0, "ns/op")
}

// benchServices returns ClusterIP Services with one TCP port.
func benchServices(n, endpoints int) []*desired.Service {
	all := make([]*desired.Service, n)
	for i := range all {
		name := changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "bench", Name: "service-" + strconv.Itoa(i)}, Protocol: v1.ProtocolTCP,
		}
		vip := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		all[i] = &desired.Service{
			Name: name, Protocol: desired.TCP, Port: &changetracker.ServicePort{Name: name, ClusterIP: vip, Port: 80},
			Frontends: []desired.Frontend{{
				Kind: desired.ClusterIP, VIP: vip, Port: 80, Scope: desired.ScopeCluster, Action: desired.Forward,
			}},
		}
		for j := i * endpoints; j < (i+1)*endpoints; j++ {
			at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, byte(j >> 16), byte(j >> 8), byte(j)}), 8080)
			all[i].Cluster = all[i].Cluster.With(at)
		}
		all[i].Serving = all[i].Cluster
	}
	return all
}

// withOther returns a copy of a Service with another last endpoint.
func withOther(s *desired.Service, i int) *desired.Service {
	other := *s
	addrs := slices.Clone(s.Cluster.Slice())
	addrs[len(addrs)-1] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{99, byte(i >> 16), byte(i >> 8), byte(i)}), 8080)
	other.Cluster = desired.EndpointsOf(addrs...)
	other.Serving = other.Cluster
	return &other
}
