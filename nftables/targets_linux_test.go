package nftables

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// benchFull asks for the sizes of large clusters; without it the benchmark only
// proves that it works.
const benchFull = "SERVICEPLANE_BENCH_FULL"

// BenchmarkTargets measures a sync from the event to the programmed kernel, and
// prints a table. Beside each figure stands its floor in the same run: the very
// bytes that the engine sent, sent again by a bare netlink loop into an empty
// namespace.
func BenchmarkTargets(b *testing.B) {
	sizes, huge, runs, seconds := []int{50, 100}, [][2]int{{50, 5}}, 3, 1
	if os.Getenv(benchFull) == "1" {
		sizes, huge, runs, seconds = []int{1000, 5000, 10000, 30000}, [][2]int{{5000, 50}, {45000, 2}}, 7, 60
	}
	t := &table{}
	for range b.N {
		t.rows = nil
		for _, n := range sizes {
			benchSize(b, t, n, runs)
		}
		c := newCluster(sizes[len(sizes)/2], 10)
		at := fmt.Sprintf(" N=%d", len(c.services))
		t.add("first important Service usable"+at, measureFirstService(b, c, runs))
		lone, _ := measureSustained(b, c, 100, 100*time.Millisecond)
		t.add("p99 of a lone change"+at, lone)
		many, rate := measureSustained(b, c, 1000*seconds, time.Millisecond)
		t.add(fmt.Sprintf("p99 of %.0f changes a second for %ds%s", rate, seconds, at), many)
		for _, h := range huge {
			c := newCluster(h[0], h[1])
			t.add(fmt.Sprintf("first sync N=%d E=%d", h[0], h[1]), measureFirst(b, c, 3))
		}
		for _, n := range []int{100, 1000, 5000} {
			t.add(fmt.Sprintf("tracking: 1 of %d endpoints flipped", n), measureFlip(b, n, runs))
		}
		t.add("tracking: initial load 5000 x 10", measureTracking(b, newCluster(5000, 10), runs))
	}
	t.print(os.Stdout)
}

func benchSize(b *testing.B, t *table, n, runs int) {
	c := newCluster(n, 10)
	at := fmt.Sprintf(" N=%d", n)
	t.add("first sync"+at+" E=10", measureFirst(b, c, min(runs, 5)))
	t.add("  longest wait of another writer", measureWait(b, c, 3))
	p := newProgrammed(b, c)
	t.add("1 endpoint replaced"+at, p.measureReplace(b, 1, 300))
	t.add("100 endpoints in one sync"+at, p.measureReplace(b, min(100, n), 50))
	t.add("full sync, nothing changed"+at, p.measureFull(b, 3))
	t.add("table deleted by somebody, all repaired"+at, p.measureRepair(b, 3))
	p.stop()
	t.add("restart, nothing changed"+at, p.measureRestart(b, 3))
}

// figure is the median of several runs.
type figure struct {
	wall, cpu, floor time.Duration
	allocs           uint64
	writes           int
}

type table struct {
	rows []string
}

func (t *table) add(what string, f figure) {
	floor, ratio := "-", "-"
	if f.floor > 0 {
		floor, ratio = f.floor.Round(100*time.Nanosecond).String(), strconv.FormatFloat(float64(f.wall)/float64(f.floor), 'f', 1, 64)
	}
	t.rows = append(t.rows, fmt.Sprintf("%s\t%v\t%v\t%s\t%s\t%d\t%d\t", what,
		f.wall.Round(100*time.Nanosecond), f.cpu.Round(100*time.Nanosecond), floor, ratio, f.allocs, f.writes))
}

func (t *table) print(w io.Writer) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\nwhat\twall\tCPU\tfloor\twall/floor\tallocs\twrites\t")
	for _, r := range t.rows {
		fmt.Fprintln(tw, r)
	}
	tw.Flush()
}

// measure runs f and returns the medians.
func measure(runs int, prepare, f func()) figure {
	var walls, cpus []time.Duration
	var allocs []uint64
	var before, after runtime.MemStats
	for range runs {
		prepare()
		runtime.GC()
		runtime.ReadMemStats(&before)
		cpu, start := cpuTime(), time.Now()
		f()
		walls, cpus = append(walls, time.Since(start)), append(cpus, cpuTime()-cpu)
		runtime.ReadMemStats(&after)
		allocs = append(allocs, after.Mallocs-before.Mallocs)
	}
	return figure{wall: median(walls), cpu: median(cpus), allocs: median(allocs)}
}

// measureLoop is measure for what is too short to be timed once.
func measureLoop(times int, f func(i int)) figure {
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	walls := make([]time.Duration, 0, times)
	cpu := cpuTime()
	for i := range times {
		start := time.Now()
		f(i)
		walls = append(walls, time.Since(start))
	}
	cpu = (cpuTime() - cpu) / time.Duration(times)
	runtime.ReadMemStats(&after)
	return figure{wall: median(walls), cpu: cpu, allocs: (after.Mallocs - before.Mallocs) / uint64(times)}
}

func median[T time.Duration | uint64](values []T) T {
	slices.Sort(values)
	return values[len(values)/2]
}

func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// cluster is N ClusterIP Services with one TCP port and E ready endpoints each.
type cluster struct {
	services []*v1.Service
	slices   []*discovery.EndpointSlice
}

func newCluster(services, endpoints int) *cluster {
	c := &cluster{}
	for n := range services {
		meta := metav1.ObjectMeta{Namespace: "bench", Name: "service-" + strconv.Itoa(n)}
		c.services = append(c.services, &v1.Service{
			ObjectMeta: meta,
			Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeClusterIP, ClusterIP: netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}).String(),
				Ports: []v1.ServicePort{{Protocol: v1.ProtocolTCP, Port: 80}},
			},
		})
		c.slices = append(c.slices, newSlice(meta, n*endpoints, endpoints))
	}
	return c
}

func newSlice(meta metav1.ObjectMeta, first, endpoints int) *discovery.EndpointSlice {
	name, tcp, port, ready, node := "", v1.ProtocolTCP, int32(8080), true, "node-7"
	slice := &discovery.EndpointSlice{ObjectMeta: meta, AddressType: discovery.AddressTypeIPv4}
	slice.Labels = map[string]string{discovery.LabelServiceName: meta.Name}
	slice.Ports = []discovery.EndpointPort{{Name: &name, Protocol: &tcp, Port: &port}}
	for i := first; i < first+endpoints; i++ {
		slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
			Addresses:  []string{netip.AddrFrom4([4]byte{11 + byte(i>>24), byte(i >> 16), byte(i >> 8), byte(i)}).String()},
			Conditions: discovery.EndpointConditions{Ready: &ready}, NodeName: &node,
		})
	}
	return slice
}

// replaced returns a copy of a slice with one other endpoint.
func replaced(slice *discovery.EndpointSlice, i int) *discovery.EndpointSlice {
	other := *slice
	other.Endpoints = slices.Clone(slice.Endpoints)
	other.Endpoints[4].Addresses = []string{netip.AddrFrom4([4]byte{99, byte(i >> 16), byte(i >> 8), byte(i)}).String()}
	return &other
}

// recorder keeps what the engine sends.
type recorder struct {
	kernel
	on      bool
	batches [][]byte
}

func (r *recorder) commit(ctx context.Context, w *wire) error {
	if r.on {
		r.batches = append(r.batches, bytes.Clone(w.buf))
	}
	return r.kernel.commit(ctx, w)
}

// programmed is a running Provider over a cluster.
type programmed struct {
	*proxier.Proxier
	engine   *Engine
	recorder *recorder
	ns       *netns.NS
	cluster  *cluster
	stop     func()
	writes   atomic.Int64 // of all syncs so far

	syncs, fullSyncs atomic.Int64
	onRepair         atomic.Pointer[atomic.Int64] // counts repairs

	mu        sync.Mutex  // guards the two below
	underWay  []time.Time // arrivals of events that are not in the kernel yet
	latencies []time.Duration
}

// ObserveSync implements proxier.Observer.
func (p *programmed) ObserveSync(r proxier.SyncReport) {
	p.writes.Add(int64(r.Apply.Writes))
	p.syncs.Add(1)
	if r.Full {
		p.fullSyncs.Add(1)
	}
	if n := p.onRepair.Load(); n != nil && r.Full && r.Err == nil {
		n.Add(1)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for len(p.underWay) > 0 && p.underWay[0].Before(r.Started) {
		p.latencies = append(p.latencies, now.Sub(p.underWay[0]))
		p.underWay = p.underWay[1:]
	}
}

func startProvider(b *testing.B, c *cluster, ns *netns.NS) *programmed {
	b.Helper()
	return startLimited(b, c, ns, runner.Options{MinInterval: runner.Unlimited})
}

func startLimited(tb testing.TB, c *cluster, ns *netns.NS, limits runner.Options) *programmed {
	tb.Helper()
	return startConfigured(tb, c, ns, proxier.Config{Runner: limits})
}

// startConfigured starts a Provider of IPv4 in a namespace.
func startConfigured(tb testing.TB, c *cluster, ns *netns.NS, own proxier.Config) *programmed {
	tb.Helper()
	own.Families, own.NetNS = []v1.IPFamily{v1.IPv4Protocol}, ns.Path()
	config := Config{Config: own}
	engine, err := newEngine(config, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		tb.Fatal(err)
	}
	p := &programmed{engine: engine, recorder: &recorder{}, ns: ns, cluster: c}
	open := engine.open
	engine.open = func() (kernel, error) {
		k, err := open()
		p.recorder.kernel = k
		return p.recorder, err
	}
	p.Proxier, err = proxier.New(config.Config, proxier.Deps{Observer: p}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(tb.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	// A watch that begins after the first write asks for one more sync.
	for !engine.watches.listening() && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	p.stop = func() {
		cancel()
		if err := <-done; err != nil {
			tb.Errorf("run: %v", err)
		}
	}
	return p
}

func (p *programmed) load(tb testing.TB) {
	tb.Helper()
	for i := range p.cluster.services {
		p.OnServiceAdd(p.cluster.services[i])
		p.OnEndpointSliceAdd(p.cluster.slices[i])
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	p.sync(tb)
}

func (p *programmed) sync(tb testing.TB) {
	tb.Helper()
	if err := p.Sync(tb.Context()); err != nil {
		tb.Fatalf("sync: %v", err)
	}
}

func newProgrammed(b *testing.B, c *cluster) *programmed {
	p := startProvider(b, c, netnstest.New(b))
	p.load(b)
	return p
}

// replay sends recorded batches with nothing around them.
func replay(b *testing.B, k kernel, batches [][]byte) {
	for _, batch := range batches {
		if err := k.commit(b.Context(), &wire{buf: batch}); err != nil {
			b.Fatalf("replay: %v", err)
		}
	}
}

func openKernel(b *testing.B, ns *netns.NS) kernel {
	k, err := openSocket(ns.Path())
	if err != nil {
		b.Fatal(err)
	}
	return k
}

// measureFirst is everything from the first event on: tracking, resolving,
// encoding and programming.
func measureFirst(b *testing.B, c *cluster, runs int) figure {
	var p *programmed
	f := measure(runs, func() {
		if p != nil {
			p.stop()
			p.ns.Close()
		}
		ns, err := netns.New()
		netnstest.Check(b, err)
		p = startProvider(b, c, ns)
		p.recorder.on = true
	}, func() { p.load(b) })
	batches, writes := p.recorder.batches, int(p.writes.Load())
	p.stop()
	p.ns.Close()

	var k kernel
	floor := measure(runs, func() {
		if k != nil {
			k.close()
		}
		k = openKernel(b, netnstest.New(b))
	}, func() { replay(b, k, batches) })
	k.close()
	f.floor, f.writes = floor.wall, writes
	return f
}

// measureWait is the longest time that somebody else's smallest transaction takes
// during a first sync: nf_tables lets in one at a time per network namespace. The
// floor is the longest time without us.
func measureWait(b *testing.B, c *cluster, runs int) figure {
	b.Helper()
	var waits, alone []time.Duration
	for range runs {
		ns, err := netns.New()
		netnstest.Check(b, err)
		p := startProvider(b, c, ns)
		stop := make(chan struct{})
		longest := make(chan time.Duration)
		go func() { longest <- longestCommit(b, ns, stop) }()
		p.load(b)
		close(stop)
		waits = append(waits, <-longest)
		quiet := make(chan struct{})
		time.AfterFunc(50*time.Millisecond, func() { close(quiet) })
		alone = append(alone, longestCommit(b, ns, quiet))
		p.stop()
		ns.Close()
	}
	return figure{wall: median(waits), floor: median(alone)}
}

// longestCommit writes tables of its own, one after the other.
func longestCommit(b *testing.B, ns *netns.NS, stop <-chan struct{}) (longest time.Duration) {
	b.Helper()
	k := openKernel(b, ns)
	defer k.close()
	for {
		select {
		case <-stop:
			return longest
		default:
		}
		w := &wire{family: familyIPv4, table: "somebody-else"}
		w.batchMarker(nfnlBatchBegin)
		w.newTable()
		w.batchMarker(nfnlBatchEnd)
		start := time.Now()
		if err := k.commit(b.Context(), w); err != nil {
			b.Errorf("commit: %v", err)
			return longest
		}
		longest = max(longest, time.Since(start))
	}
}

// measureReplace replaces one endpoint in each of some Services, there and back,
// and syncs.
func (p *programmed) measureReplace(b *testing.B, services, times int) figure {
	versions := [2][]*discovery.EndpointSlice{}
	for i := range services {
		slice := p.cluster.slices[(i*37)%len(p.cluster.slices)]
		versions[0] = append(versions[0], replaced(slice, i))
		versions[1] = append(versions[1], slice)
	}
	// Past the Provider's handlers, which would have a sync begin at the first event.
	step := func(i int) {
		for _, slice := range versions[i%2] {
			p.Tracker().Endpoints.EndpointSliceUpdate(slice, false)
		}
		p.sync(b)
	}
	before := p.writes.Load()
	f := measureLoop(times, step)
	f.writes = int(p.writes.Load()-before) / times
	p.recorder.on, p.recorder.batches = true, nil
	there, back := times, times+1
	step(there)
	step(back)
	p.recorder.on = false
	batches := p.recorder.batches
	// Through the idle engine's own socket: another one's writes would be damage.
	f.floor = measureLoop(times, func(i int) { replay(b, p.recorder.kernel, batches[i%2:i%2+1]) }).wall
	return f
}

// measureFull makes the provider check everything against the kernel.
func (p *programmed) measureFull(b *testing.B, runs int) figure {
	n, before := 0, p.writes.Load()
	f := measure(runs, func() {
		n++
		p.Tracker().SetNode(changetracker.Node{Name: "bench", Zone: strconv.Itoa(n)})
	}, func() { p.sync(b) })
	f.writes = int(p.writes.Load() - before)
	f.floor = p.measureDump(b, runs)
	return f
}

// measureDump reads all sets of the table and does nothing with them.
func (p *programmed) measureDump(b *testing.B, runs int) time.Duration {
	e := *p.engine
	e.kernel = openKernel(b, p.ns)
	defer e.kernel.close()
	return measure(runs, func() {}, func() {
		for i := range e.specs {
			if err := e.listElements(b.Context(), &e.specs[i], func() {}, func(element) {}); err != nil {
				b.Fatal(err)
			}
		}
	}).wall
}

// measureRestart starts a new Provider on the populated kernel.
func (p *programmed) measureRestart(b *testing.B, runs int) figure {
	var next *programmed
	f := measure(runs, func() {
		if next != nil {
			next.stop()
		}
		next = startProvider(b, p.cluster, p.ns)
	}, func() { next.load(b) })
	f.writes = int(next.writes.Load())
	next.stop()
	f.floor = p.measureDump(b, runs)
	return f
}

// measureFlip is change tracking alone: one endpoint of a large Service in slices
// of 100 becomes unready, and ready again.
func measureFlip(b *testing.B, endpoints, runs int) figure {
	tracker := newTracker(b)
	c := newCluster(1, 1)
	tracker.Services.Update(nil, c.services[0])
	var slice *discovery.EndpointSlice
	for i := 0; i < endpoints; i += 100 {
		meta := c.services[0].ObjectMeta
		slice = newSlice(meta, i, 100)
		slice.Name += "-" + strconv.Itoa(i)
		tracker.Endpoints.EndpointSliceUpdate(slice, false)
	}
	apply(b, tracker)
	other := replaced(slice, 0)
	notReady := false
	other.Endpoints[4].Addresses = slice.Endpoints[4].Addresses
	other.Endpoints[4].Conditions.Ready = &notReady
	return measureLoop(100*runs, func(i int) {
		tracker.Endpoints.EndpointSliceUpdate([]*discovery.EndpointSlice{other, slice}[i%2], false)
		apply(b, tracker)
	})
}

func measureTracking(b *testing.B, c *cluster, runs int) figure {
	return measure(runs, func() {}, func() {
		tracker := newTracker(b)
		for i := range c.services {
			tracker.Services.Update(nil, c.services[i])
			tracker.Endpoints.EndpointSliceUpdate(c.slices[i], false)
		}
		apply(b, tracker)
	})
}

func newTracker(b *testing.B) *changetracker.Tracker {
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}})
	if err != nil {
		b.Fatal(err)
	}
	return tracker
}

func apply(b *testing.B, tracker *changetracker.Tracker) {
	err := tracker.Apply(v1.IPv4Protocol, func(*changetracker.State, changetracker.Delta) error { return nil })
	if err != nil {
		b.Fatal(err)
	}
}
