package iptables

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// benchFull enables the sizes of large clusters; otherwise the benchmark only checks that it
// runs.
const benchFull = "SERVICEPLANE_BENCH_FULL"

// BenchmarkTargets measures the syncs of one engine from the Update to the tables of
// the kernel. Each figure has its floor from the same run: the time of the bare program for
// the same bytes, into an empty namespace for the first sync, or for reading both tables if
// nothing is written. "empty" is a run of the program without changes in the nat table.
func BenchmarkTargets(b *testing.B) {
	const endpoints = 10
	sizes := map[Variant][]int{VariantLegacy: {1000}, VariantNFT: {1000}}
	switch {
	case testing.Short():
		sizes = map[Variant][]int{VariantLegacy: {100}, VariantNFT: {100}}
	case os.Getenv(benchFull) == "1":
		sizes = map[Variant][]int{VariantLegacy: {1000, 5000, 10000}, VariantNFT: {1000, 5000}}
	}
	for _, variant := range []Variant{VariantLegacy, VariantNFT} {
		for i, n := range sizes[variant] {
			kinds := []proxier.Names{proxier.DefaultNames()}
			if i == 0 {
				kinds = append(kinds, proxier.KubeProxyNames())
			}
			for _, names := range kinds {
				b.Run(fmt.Sprintf("%s/%s/N=%d/E=%d", variant, names.Instance, n, endpoints), func(b *testing.B) {
					benchSyncs(b, &bench{variant: variant, names: names, services: newServices(n, endpoints)})
				})
			}
		}
	}
}

func benchSyncs(b *testing.B, c *bench) {
	b.Helper()
	b.Run("first", c.first)
	c.ns = netnstest.New(b)
	e := c.engine(b, c.ns)
	defer func() {
		if err := e.Close(); err != nil {
			b.Errorf("close: %v", err)
		}
	}()
	c.apply(b, e, c.fullUpdate())
	whole := e.report.Bytes
	b.Run("restart", c.restart)
	b.Run("full", func(b *testing.B) { c.full(b, e) })
	b.Run("replaced=1", func(b *testing.B) { c.replace(b, e, 1, whole) })
	b.Run("replaced=100", func(b *testing.B) { c.replace(b, e, min(100, len(c.services)), whole) })
}

// newServices are ClusterIP Services with one TCP port.
func newServices(n, endpoints int) []*desired.Service {
	all := make([]*desired.Service, n)
	for i := range all {
		name := changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "bench", Name: "service-" + strconv.Itoa(i)}, Protocol: v1.ProtocolTCP,
		}
		vip := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		all[i] = &desired.Service{
			Name: name, Protocol: desired.TCP, Port: &changetracker.ServicePort{Name: name, ClusterIP: vip, Port: 80},
			Frontends: []desired.Frontend{{
				Kind: desired.ClusterIP, VIP: vip, Port: 80, Scope: desired.ScopeCluster, Action: desired.Forward, Masquerade: desired.MasqueradeNonPod,
			}},
		}
		for j := i * endpoints; j < (i+1)*endpoints; j++ {
			at := netip.AddrFrom4([4]byte{11, byte(j >> 16), byte(j >> 8), byte(j)})
			all[i].Cluster = all[i].Cluster.With(netip.AddrPortFrom(at, 8080))
		}
	}
	return all
}

// replaced returns a copy of a Service with one other endpoint.
func replaced(s *desired.Service, i int) *desired.Service {
	other := *s
	addrs := slices.Clone(s.Cluster.Slice())
	at := netip.AddrFrom4([4]byte{99, byte(i >> 16), byte(i >> 8), byte(i)})
	addrs[len(addrs)/2] = netip.AddrPortFrom(at, 8080)
	other.Cluster = desired.EndpointsOf(addrs...)
	return &other
}

// bench is one configuration to measure.
type bench struct {
	variant  Variant
	names    proxier.Names
	services []*desired.Service
	ns       *netns.NS // programmed
}

func (c *bench) config(ns *netns.NS) Config {
	return Config{Config: proxier.Config{NetNS: ns.Path(), Names: c.names}, Variant: c.variant}.WithDefaults()
}

func (c *bench) engine(tb testing.TB, ns *netns.NS) *engine {
	tb.Helper()
	e, err := newEngine(c.config(ns), v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		tb.Fatal(err)
	}
	return e
}

// update returns a partial Update with some Services.
func (c *bench) update(services []*desired.Service) desired.Update {
	return desired.Update{
		Family: v1.IPv4Protocol, Changes: desired.ChangesTo(services...),
		Globals: desired.Globals{
			NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")},
			PodCIDRs:          []netip.Prefix{netip.MustParsePrefix("11.0.0.0/8")},
		},
	}
}

func (c *bench) fullUpdate() desired.Update {
	u := c.update(c.services)
	u.Full = true
	return u
}

func (c *bench) apply(tb testing.TB, e *engine, u desired.Update) {
	tb.Helper()
	if _, err := e.Apply(tb.Context(), u); err != nil {
		tb.Fatalf("apply: %v", err)
	}
}

// program opens the programs without an engine.
func (c *bench) program(b *testing.B, ns *netns.NS) *tool {
	b.Helper()
	p, err := openTool(b.Context(), toolConfig{
		family: v1.IPv4Protocol, netNS: ns.Path(), variant: c.variant, lockWait: defaultLockWait, timeout: defaultTimeout,
	})
	if err != nil {
		b.Fatalf("open programs: %v", err)
	}
	return p
}

// floorRuns is how often a floor is measured.
const floorRuns = 2

// floor reports the shortest time of several runs.
func floor(b *testing.B, unit string, f func(ctx context.Context, i int) error) {
	b.Helper()
	var took []time.Duration
	for i := range floorRuns {
		began := time.Now()
		if err := f(b.Context(), i); err != nil {
			b.Fatalf("floor: %v", err)
		}
		took = append(took, time.Since(began))
	}
	b.ReportMetric(float64(slices.Min(took).Microseconds())/1000, unit)
}

// report sums up syncs, and reports the average. Own is the time of the engine without the
// programs.
type report struct {
	writes, bytes int
	kernel        time.Duration
}

func (r *report) add(a proxier.ApplyReport) {
	r.writes, r.bytes, r.kernel = r.writes+a.Writes, r.bytes+a.Bytes, r.kernel+a.Kernel
}

func (r *report) print(b *testing.B) {
	b.Helper()
	n := float64(b.N)
	b.ReportMetric(float64(b.Elapsed().Microseconds())/1000/n, "ms")
	b.ReportMetric(float64((b.Elapsed()-r.kernel).Microseconds())/1000/n, "own-ms")
	b.ReportMetric(float64(r.writes)/n, "writes")
	b.ReportMetric(float64(r.bytes)/n, "bytes")
	b.ReportMetric(0, "ns/op")
}

// first is a sync of an empty namespace, with all checks of the programs.
func (c *bench) first(b *testing.B) {
	b.ReportAllocs()
	var r report
	for range b.N {
		b.StopTimer()
		e, u := c.engine(b, netnstest.New(b)), c.fullUpdate()
		b.StartTimer()
		c.apply(b, e, u)
		b.StopTimer()
		r.add(e.report)
		if err := e.Close(); err != nil {
			b.Errorf("close: %v", err)
		}
		b.StartTimer()
	}
	b.StopTimer()
	r.print(b)
	config, u := c.config(netnstest.New(b)), c.fullUpdate()
	text, bare := []byte(plan(&config, v1.IPv4Protocol, &u)), []*tool{}
	for range floorRuns {
		bare = append(bare, c.program(b, netnstest.New(b)))
	}
	floor(b, "floor-ms", func(ctx context.Context, i int) error { return bare[i].restore(ctx, text) })
}

// restart is the first sync of a new engine without differences.
func (c *bench) restart(b *testing.B) {
	b.ReportAllocs()
	var r report
	for range b.N {
		e := c.engine(b, c.ns)
		c.apply(b, e, c.fullUpdate())
		r.add(e.report)
		if err := e.Close(); err != nil {
			b.Errorf("close: %v", err)
		}
	}
	b.StopTimer()
	r.print(b)
	if r.writes > 0 {
		b.Errorf("restarts write %d rules and chains, want 0", r.writes)
	}
	c.readFloor(b)
}

// full is a full sync without differences.
func (c *bench) full(b *testing.B, e *engine) {
	b.ReportAllocs()
	var r report
	for range b.N {
		c.apply(b, e, c.fullUpdate())
		r.add(e.report)
	}
	b.StopTimer()
	r.print(b)
	if r.writes > 0 {
		b.Errorf("full syncs write %d rules and chains, want 0", r.writes)
	}
	c.readFloor(b)
}

func (c *bench) readFloor(b *testing.B) {
	b.Helper()
	p := c.program(b, c.ns)
	floor(b, "floor-ms", func(ctx context.Context, _ int) error {
		for _, table := range []string{tableNAT, tableFilter} {
			if _, err := p.save(ctx, table); err != nil {
				return err
			}
		}
		return nil
	})
}

// replace replaces one endpoint in each of some Services, there and back.
func (c *bench) replace(b *testing.B, e *engine, services, whole int) {
	b.ReportAllocs()
	var r report
	versions := [2][]*desired.Service{}
	for i := range services {
		s := c.services[(i*37)%len(c.services)]
		versions[0], versions[1] = append(versions[0], replaced(s, i)), append(versions[1], s)
	}
	c.apply(b, e, c.fullUpdate()) // the previous floor has damaged the tables
	b.ResetTimer()
	for i := range b.N {
		c.apply(b, e, c.update(versions[i%2]))
		r.add(e.report)
	}
	b.StopTimer()
	r.print(b)
	b.ReportMetric(100*float64(r.bytes)/float64(b.N)/float64(whole), "%of-whole")
	p := c.program(b, c.ns)
	c.apply(b, e, c.update(versions[1]))
	floor(b, "empty-ms", func(ctx context.Context, _ int) error { return p.restore(ctx, []byte("*nat\nCOMMIT\n")) })
	there, back := between(e.model, versions[1], versions[0]), between(e.model, versions[0], versions[1])
	floor(b, "floor-ms", func(ctx context.Context, i int) error { return p.restore(ctx, [][]byte{there, back}[i%2]) })
}

// between returns the script that replaces some Services by others.
func between(m *model, before, after []*desired.Service) []byte {
	have, want := ruleset{}, ruleset{}
	for i := range before {
		maps.Copy(have, m.planPort(before[i]).chains)
		maps.Copy(want, m.planPort(after[i]).chains)
	}
	for chain := range have {
		if _, ok := want[chain]; !ok {
			want[chain] = nil
		}
	}
	return compose(changeOf(have, want, false), changeOf(nil, nil, true)).b.Bytes()
}
