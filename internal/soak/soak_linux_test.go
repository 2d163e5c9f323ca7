package soak

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/userspace"
)

// The defaults are a short run of every engine.
var (
	engine   = flag.String("engine", "", "only this engine: nftables, iptables-nft, iptables-legacy, userspace or ebpf")
	seedFlag = flag.Uint64("seed", 0, "the seed of the changes; 0 for a new one")
	services = flag.Int("services", 60, "how many Services there are")
	events   = flag.Int("events", 1000, "how many changes")
	atOnce   = flag.Int("at-once", 50, "how many changes come between two waits until all are programmed")
	rate     = flag.Int("rate", 0, "changes a second, for the time of -for, instead of -events and -at-once")
	duration = flag.Duration("for", time.Minute, "how long changes come with -rate")
)

func TestMain(m *testing.M) {
	flag.Parse()
	goleak.VerifyTestMain(m)
}

// engines are the proxies. pins, unless it is empty, is where they pin what the kernel keeps.
func engines() map[string]subject {
	all := map[string]subject{"ebpf": withSockets}
	for name, factory := range factories() {
		all[name] = func(*testing.T, *proxiertest.Topology) (proxiertest.Factory, string) { return factory, "" }
	}
	return all
}

// subject makes the factory of a node.
type subject func(t *testing.T, topology *proxiertest.Topology) (factory proxiertest.Factory, pins string)

// withSockets translates the sockets of the node and of its pods.
func withSockets(t *testing.T, topology *proxiertest.Topology) (factory proxiertest.Factory, pins string) {
	t.Helper()
	list := &ebpf.Namespaces{Only: true}
	for _, host := range append([]*proxiertest.Host{topology.Node}, topology.LocalPods...) {
		netnstest.Check(t, list.Add(host.NetNS()))
	}
	sockets := ebpf.Sockets{BPFFS: bpftest.FileSystem(t), Cgroups: []string{bpftest.OwnCgroup(t)}, Namespaces: list}
	return func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		return ebpf.New(ebpf.Config{Config: nftables.Config{Config: config}, Sockets: sockets}, deps)
	}, sockets.BPFFS
}

func factories() map[string]proxiertest.Factory {
	withIPTables := func(v iptables.Variant) proxiertest.Factory {
		return func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
			return iptables.New(iptables.Config{Config: config, Variant: v}, deps)
		}
	}
	return map[string]proxiertest.Factory{
		"nftables": func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
			return nftables.New(nftables.Config{Config: config}, deps)
		},
		"iptables-nft":    withIPTables(iptables.VariantNFT),
		"iptables-legacy": withIPTables(iptables.VariantLegacy),
		"userspace": func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
			deps.Conntrack = conntrack.New(conntrack.Options{NetNS: config.NetNS})
			return userspace.New(userspace.Config{Config: config, UDPIdle: time.Second, ShareNodePorts: true, Portals: func(family v1.IPFamily) (proxier.Engine, error) {
				return nftables.NewEngine(nftables.Config{Config: config}, family, deps)
			}}, deps)
		},
	}
}

// TestSoak: after many changes, with connections meanwhile, the proxy and the kernel hold what
// they held in the beginning, and what a new proxy makes of the same objects. No connection
// fails.
func TestSoak(t *testing.T) {
	needPrograms(t)
	for name, subject := range engines() {
		if *engine == "" || *engine == name {
			t.Run(name, func(t *testing.T) { soak(t, name, subject) })
		}
	}
}

func soak(t *testing.T, name string, subject subject) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("%d Services, seed %d", *services, seed)
	other := proxiertest.NewTopology(t)
	factory, pins := subject(t, other)
	fresh := begin(t, factory, other, pins, seed)
	want := inKernel(t, fresh.topology.Node, pins)
	fresh.end()

	topology := proxiertest.NewTopology(t)
	factory, pins = subject(t, topology)
	empty := inKernel(t, topology.Node, pins)
	n := begin(t, factory, topology, pins, seed)
	before := measure(t, topology.Node, pins)
	t.Logf("before: %v", before)
	before.descriptors += checkSockets
	if name == "userspace" {
		before.goroutines += idleWorkers
	}
	stop := n.connect()
	times := n.change()
	stop()
	n.world.restore()
	n.sync()
	after := n.awaitIdle(before)
	t.Logf("after:  %v", after)
	t.Logf("connections: %d, failed: %d, datagrams sent twice: %d; changes: %d", n.connections.Load(), n.failed.Load(), n.repeated.Load(), n.changes)
	slices.Sort(times)
	t.Logf("time to programmed: p50 %v, p99 %v, longest %v, of %d", times[len(times)/2], times[len(times)*99/100], times[len(times)-1], len(times))
	after.check(t, before)
	after.kernel.check(t, "in the end", want)
	if n.connections.Load() == 0 {
		t.Error("there were no connections")
	}
	n.end()
	runtime.KeepAlive(n.world)

	restarted := begin(t, factory, topology, pins, seed)
	inKernel(t, topology.Node, pins).check(t, "after a restart", want)
	restarted.end()
	netnstest.Check(t, restarted.provider.Cleanup(t.Context()))
	if got := inKernel(t, topology.Node, pins); got != empty {
		t.Errorf("the kernel's tables after Cleanup: %+v, want %+v", got, empty)
	}
}

// node is a running proxy with its world.
type node struct {
	t        *testing.T
	topology *proxiertest.Topology
	provider proxier.Provider
	world    *world
	pins     string
	end      func()
	changes  int
	printed  time.Time

	connections, failed, repeated atomic.Int64 // repeated are datagrams
}

func begin(t *testing.T, factory proxiertest.Factory, topology *proxiertest.Topology, pins string, seed uint64) *node {
	t.Helper()
	n := &node{t: t, topology: topology, pins: pins, printed: time.Now()}
	netnstest.ForgetSoon(t, n.topology.Node, time.Second)
	var pods []netip.Addr
	for _, pod := range append(slices.Clone(n.topology.LocalPods), n.topology.RemotePods...) {
		pods = append(pods, pod.Addr(v1.IPv4Protocol), pod.Addr(v1.IPv6Protocol))
	}
	var err error
	n.provider, err = factory(n.topology.Config(), proxier.Deps{})
	netnstest.Check(t, err)
	n.world = newWorld(n.provider, seed, pods, *services)
	n.end = poll.Background(t, n.provider.Run)
	n.sync()
	return n
}

func (n *node) sync() {
	n.t.Helper()
	if err := proxiertest.Sync(n.t.Context(), n.provider); err != nil {
		n.t.Fatalf("sync: %v", err)
	}
}

// change makes the changes of the flags. It returns how long some of them took to be programmed.
func (n *node) change() (times []time.Duration) {
	if *rate == 0 {
		for n.changes < *events {
			for range *atOnce {
				n.event()
			}
			times = append(times, n.timed())
		}
		return times
	}
	ctx, cancel := context.WithTimeout(n.t.Context(), *duration)
	defer cancel()
	// Changes do not wait for each other: the clock of the next is already running.
	samples := make(chan time.Duration)
	var sampling sync.WaitGroup
	sampling.Go(func() {
		for ctx.Err() == nil {
			samples <- n.timed()
		}
		close(samples)
	})
	start := time.Now()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C: // which a busy machine may miss
			for due := int(time.Since(start).Seconds() * float64(*rate)); n.changes < due; {
				n.event()
			}
		case taken, ok := <-samples:
			if !ok {
				sampling.Wait()
				return times
			}
			times = append(times, taken)
		}
	}
}

// event makes a change. Now and then it prints how far the test is.
func (n *node) event() {
	n.world.event()
	n.changes++
	if time.Since(n.printed) > time.Minute {
		n.printed = time.Now()
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		n.t.Logf("%d changes, %d connections, %d failed, %d goroutines, heap %d MB", n.changes, n.connections.Load(), n.failed.Load(), runtime.NumGoroutine(), memory.HeapAlloc/1e6)
	}
}

// timed returns how long it takes until the last change is programmed.
func (n *node) timed() time.Duration {
	start := time.Now()
	if err := proxiertest.Sync(n.t.Context(), n.provider); err != nil {
		n.t.Errorf("sync: %v", err)
	}
	return time.Since(start)
}

// connect makes connections to the used Services until stop is called.
func (n *node) connect() (stop func()) {
	ctx, cancel := context.WithCancel(n.t.Context())
	var clients sync.WaitGroup
	for i, from := range []*proxiertest.Host{n.topology.Client, n.topology.LocalPods[0], n.topology.Node} {
		clients.Go(func() {
			for c := i; ctx.Err() == nil; c++ {
				network := []string{"tcp", "tcp", "udp"}[c%3]
				to := netip.AddrPortFrom(clusterIP(c%used, c/used%2), 80)
				err := n.ask(ctx, from, network, to)
				if ctx.Err() != nil {
					return
				}
				n.connections.Add(1)
				if err != nil && n.failed.Add(1) <= 10 {
					n.t.Errorf("%s %s to %v: %v", from.Name, network, to, err)
				}
				pause.For(ctx, 2*time.Millisecond)
			}
		})
	}
	return func() { cancel(); clients.Wait() }
}

// ask opens a connection. A datagram is sent a second time if no answer came, as clients do:
// when an endpoint goes, so do its flows, and with them answers on their way.
func (n *node) ask(ctx context.Context, from *proxiertest.Host, network string, to netip.AddrPort) error {
	if network == "tcp" {
		_, err := from.Ask(ctx, network, to, proxiertest.AskOptions{})
		return err
	}
	flow, err := from.Open(ctx, network, to, proxiertest.AskOptions{Timeout: 5 * time.Second})
	if err != nil {
		return err
	}
	if _, err = flow.Ask(ctx); errors.Is(err, proxiertest.ErrTimeout) && ctx.Err() == nil {
		n.repeated.Add(1)
		_, err = flow.Ask(ctx)
	}
	return errors.Join(err, flow.Close())
}

// awaitIdle waits until connections have ended everywhere, and measures.
func (n *node) awaitIdle(before use) (after use) {
	poll.Soon(func() bool {
		after = measure(n.t, n.topology.Node, n.pins)
		return after.goroutines <= before.goroutines && after.descriptors <= before.descriptors && after.flows <= before.flows
	})
	return after
}
