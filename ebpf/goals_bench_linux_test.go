package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// goals is a node whose sockets are measured.
type goals struct {
	b       *testing.B
	ns      *netns.NS
	sockets Sockets
	update  desired.Update
}

func newGoals(b *testing.B, services, endpoints int) *goals {
	b.Helper()
	g := &goals{b: b, ns: netnstest.New(b), sockets: Sockets{BPFFS: bpftest.FileSystem(b), Cgroups: []string{bpftest.OwnCgroup(b)}, Namespaces: &Namespaces{Only: true}}}
	netnstest.Check(b, g.sockets.Namespaces.Add(g.ns.Path()))
	g.update = desired.Update{Family: v1.IPv4Protocol, Full: true, Globals: desired.Globals{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")}}}
	for n := range services {
		g.update.Changes = append(g.update.Changes, desired.ChangesTo(goalService(n, endpoints, 0))...)
	}
	return g
}

// goalService has other endpoints with each turn.
func goalService(n, endpoints, turn int) *desired.Service {
	s := &desired.Service{
		Name:     changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("s%06d", n)}, Protocol: v1.ProtocolTCP},
		Protocol: desired.TCP,
		Frontends: []desired.Frontend{{
			Kind: desired.ClusterIP, VIP: netip.AddrFrom4([4]byte{10, 64 + byte(n>>16), byte(n >> 8), byte(n)}), Port: 80,
			Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNonPod, Action: desired.Forward,
		}},
	}
	var all []netip.AddrPort
	for i := range endpoints {
		at := n*(endpoints+1) + i
		if i == 0 {
			at += turn % 2 * endpoints
		}
		all = append(all, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 128 + byte(at>>16), byte(at >> 8), byte(at)}), 8080))
	}
	s.Cluster = desired.EndpointsOf(all...)
	return s
}

func (g *goals) engine(realPeer bool) *Engine {
	g.b.Helper()
	sockets := g.sockets
	sockets.RealPeer = realPeer
	e, err := NewEngine(Config{Config: nftables.Config{Config: proxier.Config{NetNS: g.ns.Path()}}, Sockets: sockets}, v1.IPv4Protocol, proxier.Deps{})
	netnstest.Check(g.b, err)
	return e
}

// timedRules measures the rules alone.
type timedRules struct {
	proxier.Engine

	took   time.Duration
	writes int
}

func (r *timedRules) Apply(ctx context.Context, u desired.Update) (proxier.Result, error) {
	start := time.Now()
	result, err := r.Engine.Apply(ctx, u)
	r.took, r.writes = time.Since(start), result.Report.Writes
	return result, err
}

// apply returns what the sockets and the rules took, and how many objects of sockets were written.
func (g *goals) apply(e *Engine) (sockets, rules time.Duration, writes int) {
	g.b.Helper()
	timed := &timedRules{Engine: e.rules}
	e.rules = timed
	start := time.Now()
	result, err := e.Apply(g.b.Context(), g.update)
	netnstest.Check(g.b, err)
	e.rules = timed.Engine
	return time.Since(start) - timed.took, timed.took, result.Report.Writes - timed.writes
}

// BenchmarkSockets measures what sockets of IPv4 cost, and the rules below them in the same run: the
// first sync, a restart that changes nothing, one endpoint of ten replaced, the memory of the maps, and
// the program that runs when a socket connects.
func BenchmarkSockets(b *testing.B) {
	sizes, runs := []int{100}, 1
	if os.Getenv("SERVICEPLANE_BENCH_FULL") == "1" {
		sizes, runs = []int{10_000, 30_000, 100_000}, 5
	}
	const endpoints = 10
	for _, n := range sizes {
		b.Run(fmt.Sprintf("N=%d/E=%d", n, endpoints), func(b *testing.B) {
			g := newGoals(b, n, endpoints)
			e := g.engine(false)
			b.Run("first", func(b *testing.B) { g.measureFirst(b, e, runs) })
			b.Run("restart", func(b *testing.B) { g.measureRestart(b, e, runs) })
			b.Run("replaced=1", func(b *testing.B) { g.measureReplaced(b, e) })
			b.Run("memory", func(b *testing.B) { g.measureMemory(b, e) })
			b.Run("hook", func(b *testing.B) { g.measureHook(b, e) })
			netnstest.Check(b, e.Cleanup(b.Context()))
			e = g.engine(true)
			g.apply(e)
			b.Run("hook/real-peer", func(b *testing.B) { g.measureHook(b, e) })
			netnstest.Check(b, e.Cleanup(b.Context()))
			netnstest.Check(b, e.Close())
		})
	}
}

// few returns few at the small size.
func (g *goals) few(few, many int) int {
	if len(g.update.Changes) <= 100 {
		return few
	}
	return many
}

func medianOf(all []time.Duration) float64 {
	slices.Sort(all)
	return float64(all[len(all)/2]) / float64(time.Millisecond)
}

func (g *goals) measureFirst(b *testing.B, e *Engine, runs int) {
	var sockets, rules []time.Duration
	for i := range runs {
		if i > 0 {
			netnstest.Check(b, e.Cleanup(b.Context()))
		}
		s, r, _ := g.apply(e)
		sockets, rules = append(sockets, s), append(rules, r)
	}
	b.ReportMetric(medianOf(sockets), "ms")
	b.ReportMetric(medianOf(rules), "rules-ms")
	b.ReportMetric(medianOf(sockets)/medianOf(rules), "ratio")
	b.ReportMetric(0, "ns/op")
}

// measureRestart starts other processes on what is pinned.
func (g *goals) measureRestart(b *testing.B, e *Engine, runs int) {
	netnstest.Check(b, e.Close()) // one process at a time
	var sockets, rules []time.Duration
	written := 0
	for range runs {
		other := g.engine(false)
		s, r, writes := g.apply(other)
		sockets, rules, written = append(sockets, s), append(rules, r), written+writes
		netnstest.Check(b, other.Close())
	}
	g.apply(e)
	b.ReportMetric(medianOf(sockets), "ms")
	b.ReportMetric(medianOf(rules), "rules-ms")
	b.ReportMetric(float64(written), "writes")
	b.ReportMetric(0, "ns/op")
}

// measureReplaced publishes endpoints of which one differs from those before.
func (g *goals) measureReplaced(b *testing.B, e *Engine) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var versions [2]*carried
	n := len(g.update.Changes) / 2
	for turn := range versions {
		versions[turn] = e.config.Sockets.carry(goalService(n, 10, turn), &g.update.Globals)
	}
	changes := g.few(200, 200_000)
	start := time.Now()
	for turn := range changes {
		netnstest.Check(b, errors.Join(e.publish(g.update.Changes[n].Name, versions[(turn+1)%2]), e.layer.free(false)))
	}
	b.ReportMetric(float64(time.Since(start))/float64(changes), "ns/change")
	b.ReportMetric(0, "ns/op")
}

// measureMemory asks the kernel how much memory the maps have.
func (g *goals) measureMemory(b *testing.B, e *Engine) {
	var sum uint64
	for _, m := range e.programs.used {
		info, err := m.Info()
		netnstest.Check(b, err)
		bytes, _ := info.Memlock()
		sum += bytes
	}
	b.ReportMetric(float64(sum)/(1<<20), "maps-MiB")
	b.ReportMetric(0, "ns/op")
}

// measureHook lets sockets connect to VIPs. No endpoint has a route, so that each ends at once.
func (g *goals) measureHook(b *testing.B, e *Engine) {
	connects := g.few(200, 50_000)
	statistics, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	netnstest.Check(b, err)
	defer func() { netnstest.Check(b, statistics.Close()) }()
	before, counted := g.runs(e)
	netnstest.Check(b, g.ns.Do(func() error {
		for n := range connects {
			vip := g.update.Changes[n*7%len(g.update.Changes)].After.Frontends[0].VIP
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				return err
			}
			if err := unix.Connect(fd, &unix.SockaddrInet4{Port: 80, Addr: vip.As4()}); !errors.Is(err, unix.ENETUNREACH) {
				return fmt.Errorf("connect to %v: %w", vip, err)
			}
			if err := unix.Close(fd); err != nil {
				return err
			}
		}
		return nil
	}))
	after, translated := g.runs(e)
	if translated-counted != uint64(connects) {
		b.Errorf("%d sockets translated, want %d", translated-counted, connects)
	}
	b.ReportMetric(float64(after.Runtime-before.Runtime)/float64(after.RunCount-before.RunCount), "ns/connect")
	b.ReportMetric(0, "ns/op")
}

// runs returns what the kernel has measured of the program for connect(2), and the sockets that it has
// translated.
func (g *goals) runs(e *Engine) (stats ebpf.ProgramStats, translated uint64) {
	g.b.Helper()
	for name, a := range e.programs.attached {
		if !strings.HasPrefix(name, "connect4-") {
			continue
		}
		program, err := ebpf.NewProgramFromID(a.program)
		netnstest.Check(g.b, err)
		found, err := program.Stats()
		netnstest.Check(g.b, errors.Join(err, bpfx.Close(program)))
		stats = *found
	}
	counts, err := e.SocketCounts()
	netnstest.Check(g.b, err)
	return stats, counts.Translated
}
