package nftables

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// benchFull selects the sizes of large clusters; otherwise the benchmark only proves that
// it works.
const benchFull = "SERVICEPLANE_BENCH_FULL"

// BenchmarkTargets measures a sync from the event to the programmed kernel. Each figure has
// its floor in the same run: a bare netlink loop sends the engine's bytes again, into an
// empty namespace. Each figure is a median of several runs, whatever b.N is.
func BenchmarkTargets(b *testing.B) {
	// All of them, except at the last size, which only measures a small change.
	sizes, loads, last, runs, seconds := []int{100, 1000}, [][2]int{{50, 5}}, 30_000, 3, 1
	if os.Getenv(benchFull) == "1" {
		sizes, loads, last, runs, seconds = []int{1000, 5000, 10_000, 30_000}, [][2]int{{5000, 50}, {45_000, 2}}, 0, 7, 60
	}
	for i, n := range sizes {
		sized(b, n, 10, func(b *testing.B, c *cluster) {
			benchSyncs(b, c, runs)
			if i == len(sizes)/2 {
				benchTime(b, c, runs, seconds)
			}
		})
	}
	for _, load := range loads {
		sized(b, load[0], load[1], func(b *testing.B, c *cluster) {
			b.Run("first", func(b *testing.B) { measureFirst(b, c, 3).report(b) })
		})
	}
	if last > 0 {
		sized(b, last, 10, func(b *testing.B, c *cluster) {
			p := newProgrammed(b, c)
			defer p.stop()
			b.Run("replaced=1", func(b *testing.B) { p.measureReplace(b, 1, 300).report(b) })
		})
	}
}

// sized runs benchmarks with a cluster whose size is in their name.
func sized(b *testing.B, services, endpoints int, f func(b *testing.B, c *cluster)) {
	b.Run(fmt.Sprintf("N=%d/E=%d", services, endpoints), func(b *testing.B) { f(b, newCluster(services, endpoints)) })
}

func benchSyncs(b *testing.B, c *cluster, runs int) {
	b.Run("first", func(b *testing.B) { measureFirst(b, c, min(runs, 5)).report(b) })
	b.Run("wait", func(b *testing.B) { measureWait(b, c, 3).report(b) })
	empty := liveHeap()
	p := newProgrammed(b, c)
	b.Run("heap", func(b *testing.B) {
		b.ReportMetric(float64(liveHeap()-empty)/1e6, "heap-MB")
		b.ReportMetric(0, "ns/op")
	})
	b.Run("replaced=1", func(b *testing.B) { p.measureReplace(b, 1, 300).report(b) })
	b.Run("replaced=100", func(b *testing.B) { p.measureReplace(b, 100, 50).report(b) })
	b.Run("full", func(b *testing.B) { p.measureFull(b, 3).report(b) })
	b.Run("verify", func(b *testing.B) { p.measureVerify(b, 3).report(b) })
	b.Run("deleted", func(b *testing.B) { p.measureRepair(b, 3).report(b) })
	p.stop()
	b.Run("restart", func(b *testing.B) { p.measureRestart(b, 3).report(b) })
}

// benchTime measures the time until a change is in the kernel.
func benchTime(b *testing.B, c *cluster, runs, seconds int) {
	b.Run("important", func(b *testing.B) { measureFirstService(b, c, runs).report(b) })
	b.Run("lone", func(b *testing.B) {
		f, _ := measureSustained(b, c, 100, 100*time.Millisecond)
		f.report(b)
	})
	b.Run(fmt.Sprintf("sustained/rate=1000/seconds=%d", seconds), func(b *testing.B) {
		f, rate := measureSustained(b, c, 1000*seconds, time.Millisecond)
		f.report(b)
		b.ReportMetric(rate, "changes/s")
	})
}

// liveHeap is the size of the live heap. The second collection empties pools.
func liveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// figure is the median of several runs. Zero or nil was not measured.
type figure struct {
	wall, cpu, floor time.Duration
	allocs, bytes    uint64  // of memory
	written          *totals // of one run
}

// totals counts the writes of syncs.
type totals struct{ writes, transactions float64 }

func (f figure) report(b *testing.B) {
	b.Helper()
	for unit, d := range map[string]time.Duration{"ms": f.wall, "cpu-ms": f.cpu, "floor-ms": f.floor} {
		if d > 0 {
			b.ReportMetric(float64(d)/float64(time.Millisecond), unit)
		}
	}
	if f.allocs > 0 {
		b.ReportAllocs()
		b.ReportMetric(float64(f.bytes), "B/op")
		b.ReportMetric(float64(f.allocs), "allocs/op")
	}
	if f.written != nil {
		b.ReportMetric(f.written.writes, "writes")
		b.ReportMetric(f.written.transactions, "transactions")
	}
	b.ReportMetric(0, "ns/op")
}

// measure runs f and returns the medians.
func measure(runs int, prepare, f func()) figure {
	var walls, cpus []time.Duration
	var allocs, bytes []uint64
	var before, after runtime.MemStats
	for range runs {
		prepare()
		runtime.GC()
		runtime.ReadMemStats(&before)
		cpu, start := cpuTime(), time.Now()
		f()
		walls, cpus = append(walls, time.Since(start)), append(cpus, cpuTime()-cpu)
		runtime.ReadMemStats(&after)
		allocs, bytes = append(allocs, after.Mallocs-before.Mallocs), append(bytes, after.TotalAlloc-before.TotalAlloc)
	}
	return figure{wall: median(walls), cpu: median(cpus), allocs: median(allocs), bytes: median(bytes)}
}

// measureLoop is measure for functions that are too short to be timed once.
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
	n := uint64(times)
	return figure{wall: median(walls), cpu: cpu, allocs: (after.Mallocs - before.Mallocs) / n, bytes: (after.TotalAlloc - before.TotalAlloc) / n}
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

// recorder records the batches of the engine.
type recorder struct {
	last    kernel
	on      bool
	batches [][]byte
	// before and after run once each, around the next commit.
	before, after atomic.Pointer[func()]
}

// recorded is a socket of the engine.
type recorded struct {
	kernel
	*recorder
}

func (r recorded) Commit(ctx context.Context, w *nft.Batch) error {
	for _, hook := range []*atomic.Pointer[func()]{&r.before, &r.after} {
		if do := hook.Swap(nil); do != nil && hook == &r.before {
			(*do)()
		} else if do != nil {
			defer (*do)()
		}
	}
	if r.on {
		r.batches = append(r.batches, bytes.Clone(w.Buf))
	}
	return r.kernel.Commit(ctx, w)
}

// programmed is a running Provider over a cluster.
type programmed struct {
	*proxier.Proxier
	engine   *Engine
	recorder *recorder
	ns       *netns.NS
	cluster  *cluster
	stop     func()

	writes, transactions atomic.Int64 // of all syncs so far

	syncs, fullSyncs atomic.Int64
	onRepair         atomic.Pointer[atomic.Int64] // counts repairs

	mu        sync.Mutex  // guards the two below
	underWay  []time.Time // arrivals of events that are not in the kernel yet
	latencies []time.Duration
}

// ObserveSync implements proxier.Observer.
func (p *programmed) ObserveSync(r proxier.SyncReport) {
	p.writes.Add(int64(r.Apply.Writes))
	p.transactions.Add(int64(r.Apply.Transactions))
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

func (p *programmed) totals() totals {
	return totals{float64(p.writes.Load()), float64(p.transactions.Load())}
}

// since returns the writes of each of some runs.
func (p *programmed) since(before totals, runs int) *totals {
	now, n := p.totals(), float64(runs)
	return &totals{(now.writes - before.writes) / n, (now.transactions - before.transactions) / n}
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
	own.Node.Name = "node-1" // the endpoints are on another one
	config := Config{Config: own}
	engine, err := NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		tb.Fatal(err)
	}
	p := &programmed{engine: engine, recorder: &recorder{}, ns: ns, cluster: c}
	open := engine.open
	engine.open = func() (kernel, error) {
		k, err := open()
		p.recorder.last = k
		return recorded{k, p.recorder}, err
	}
	p.Proxier, err = proxier.New(config.Config, proxier.Deps{Observer: p}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(tb.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	// A watch that starts after the first write requests one more sync.
	poll.Until(tb, "the watch begins", engine.listeners.listening)
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
	if err := proxiertest.Sync(tb.Context(), p); err != nil {
		tb.Fatalf("sync: %v", err)
	}
}

func newProgrammed(b *testing.B, c *cluster) *programmed {
	p := startProvider(b, c, netnstest.New(b))
	p.load(b)
	return p
}

// replay sends only the recorded batches.
func replay(b *testing.B, k kernel, batches [][]byte) {
	for _, batch := range batches {
		if err := k.Commit(b.Context(), &nft.Batch{Buf: batch}); err != nil {
			b.Fatalf("replay: %v", err)
		}
	}
}

func openKernel(b *testing.B, ns *netns.NS) kernel {
	k, err := nft.Dial(ns.Path())
	if err != nil {
		b.Fatal(err)
	}
	return k
}

// measureFirst measures everything from the first event on: tracking, resolving, encoding
// and programming.
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
	batches := p.recorder.batches
	f.written = p.since(totals{}, 1)
	p.stop()
	p.ns.Close()

	var k kernel
	floor := measure(runs, func() {
		if k != nil {
			k.Close()
		}
		k = openKernel(b, netnstest.New(b))
	}, func() { replay(b, k, batches) })
	k.Close()
	f.floor = floor.wall
	return f
}

// measureWait is the longest time of another program's smallest transaction during a first
// sync: nf_tables processes one transaction at a time per network namespace. The floor is
// the longest time in half a second without a sync.
func measureWait(b *testing.B, c *cluster, runs int) figure {
	b.Helper()
	var waits, alone []time.Duration
	for range runs {
		ns, err := netns.New()
		netnstest.Check(b, err)
		p := startProvider(b, c, ns)
		other := startOtherWriter(b, ns, 0)
		time.Sleep(500 * time.Millisecond)
		alone = append(alone, other.waits(b).longest)
		p.load(b)
		waits = append(waits, other.waits(b).longest)
		other.end(b)
		p.stop()
		ns.Close()
	}
	return figure{wall: median(waits), floor: median(alone)}
}

// otherWriter is a process of its own: within this one, it would also wait for its turn among goroutines.
type otherWriter struct {
	process *exec.Cmd
	ask     io.WriteCloser
	answers *bufio.Reader
}

const (
	otherWriterEnv   = "OTHER_WRITER_IN" // a network namespace
	otherWriterPause = "OTHER_WRITER_PAUSE"
)

// startOtherWriter starts one that pauses between its transactions.
func startOtherWriter(b *testing.B, ns *netns.NS, pause time.Duration) *otherWriter {
	b.Helper()
	w := &otherWriter{process: exec.CommandContext(b.Context(), os.Args[0], "-test.run=^TestOtherWriter$")}
	w.process.Env = append(os.Environ(), otherWriterEnv+"="+ns.Path(), otherWriterPause+"="+pause.String())
	w.process.Stderr = os.Stderr
	ask, err1 := w.process.StdinPipe()
	answers, err2 := w.process.StdoutPipe()
	netnstest.Check(b, errors.Join(err1, err2, w.process.Start()))
	w.ask, w.answers = ask, bufio.NewReader(answers)
	w.waits(b) // it has begun
	return w
}

// waits are what another program's smallest transactions took.
type waits struct{ p50, p99, longest time.Duration }

// waits returns what the transactions since the last call took.
func (w *otherWriter) waits(b *testing.B) (took waits) {
	b.Helper()
	_, err := w.ask.Write([]byte{'?'})
	netnstest.Check(b, err)
	line, err := w.answers.ReadString('\n')
	netnstest.Check(b, err)
	_, err = fmt.Sscan(line, &took.p50, &took.p99, &took.longest)
	netnstest.Check(b, err)
	return took
}

func (w *otherWriter) end(b *testing.B) {
	b.Helper()
	netnstest.Check(b, w.ask.Close())
	_, _ = io.Copy(io.Discard, w.answers)
	netnstest.Check(b, w.process.Wait())
}

// TestOtherWriter creates and deletes a table of its own, again and again, and answers each byte of the input with what that
// took since the last one, in nanoseconds.
func TestOtherWriter(t *testing.T) {
	path := os.Getenv(otherWriterEnv)
	if path == "" {
		return // without Skip, which the test script reports as a failure
	}
	between, err := time.ParseDuration(os.Getenv(otherWriterPause))
	netnstest.Check(t, err)
	k, err := nft.Dial(path)
	netnstest.Check(t, err)
	defer k.Close()
	questions := make(chan byte)
	go func() {
		defer close(questions)
		for one := make([]byte, 1); ; {
			if _, err := os.Stdin.Read(one); err != nil {
				return
			}
			questions <- one[0]
		}
	}()
	exists := false
	for took := []time.Duration(nil); ; time.Sleep(between) {
		select {
		case _, more := <-questions:
			if !more {
				return
			}
			slices.Sort(took)
			at := func(share float64) int64 { return int64(append(took, 0)[int(share*float64(max(len(took)-1, 0)))]) }
			fmt.Println(at(0.5), at(0.99), at(1))
			took = nil
		default:
		}
		w := newWire(unix.NFPROTO_IPV4, "somebody-else")
		w.Begin()
		if exists = !exists; exists {
			w.newTable()
		} else {
			w.DeleteTable()
		}
		w.Finish()
		start := time.Now()
		netnstest.Check(t, k.Commit(t.Context(), &w.Batch))
		took = append(took, time.Since(start))
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
	return p.measureVersions(b, versions, times)
}

// measureVersions measures syncs that change slices from one version to the other, and back.
func (p *programmed) measureVersions(b *testing.B, versions [2][]*discovery.EndpointSlice, times int) figure {
	// Without the Provider's handlers, which would start a sync at the first event.
	step := func(i int) {
		for _, slice := range versions[i%2] {
			p.Tracker().Endpoints.EndpointSliceUpdate(slice, false)
		}
		p.sync(b)
	}
	before := p.totals()
	f := measureLoop(times, step)
	f.written = p.since(before, times)
	p.recorder.on, p.recorder.batches = true, nil
	there, back := times, times+1
	step(there)
	step(back)
	p.recorder.on = false
	batches := p.recorder.batches
	// Through the idle engine's own socket: writes of another socket would count as damage.
	f.floor = measureLoop(times, func(i int) { replay(b, p.recorder.last, batches[i%2:i%2+1]) }).wall
	return f
}

// measureFull measures a full sync, which compares everything with the kernel.
func (p *programmed) measureFull(b *testing.B, runs int) figure {
	n, before := 0, p.totals()
	f := measure(runs, func() {
		n++
		p.Tracker().SetNode(changetracker.Node{Name: "bench", Zone: strconv.Itoa(n)})
	}, func() { p.sync(b) })
	f.written = p.since(before, runs)
	f.floor = p.measureDump(b, runs)
	return f
}

// measureVerify compares everything with the kernel, and writes nothing. Syncs wait meanwhile.
func (p *programmed) measureVerify(b *testing.B, runs int) figure {
	f := measure(runs, func() {}, func() {
		found, err := p.Verify(b.Context())
		if v := found[v1.IPv4Protocol]; err != nil || v.Err != nil || v.Total > 0 || v.Checked == 0 {
			b.Fatalf("verify: %+v, %v; want no difference", v, err)
		}
	})
	f.floor = p.measureDump(b, runs)
	return f
}

// measureDump only reads all sets of the table. In the largest clusters, where it takes half a
// minute and more, it is not measured.
func (p *programmed) measureDump(b *testing.B, runs int) time.Duration {
	if len(p.cluster.services) > 50_000 {
		return 0
	}
	e := &Engine{config: p.engine.config, family: p.engine.family, kernel: openKernel(b, p.ns), state: p.engine.state, batch: p.engine.batch}
	defer e.kernel.Close()
	return measure(runs, func() {}, func() {
		for i := range setSpecs {
			if !e.state.layout.rules.has(&setSpecs[i]) {
				continue
			}
			if err := e.listElements(b.Context(), &setSpecs[i], func() {}, func(nft.Element) {}); err != nil {
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
	}, func() { // with the start, because the engine then begins to read
		next = startProvider(b, p.cluster, p.ns)
		next.load(b)
	})
	f.written = next.since(totals{}, 1)
	next.stop()
	f.floor = p.measureDump(b, runs)
	return f
}
