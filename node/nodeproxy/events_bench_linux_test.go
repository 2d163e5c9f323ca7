package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// BenchmarkEventToPacket measures what users see of nodeproxy, a process of its own that watches an
// API server: the time from a changed EndpointSlice to the first connection that follows it, one
// change at a time, and beside 100 changes a second of other Services; and nodeproxy's CPU time for
// a change. At last, nodeproxy is killed, the Service changes, and nodeproxy starts again, while
// clients connect: none of them must fail.
func BenchmarkEventToPacket(b *testing.B) {
	sizes, lone, busy := []int{100}, 5, 5
	if os.Getenv("SERVICEPLANE_BENCH_FULL") == "1" {
		sizes, lone, busy = []int{1000, 10_000, 30_000}, 100, 100
	}
	for _, n := range sizes {
		b.Run(fmt.Sprintf("N=%d/E=10", n), func(b *testing.B) {
			w := newWatched(b, n)
			for _, load := range []struct {
				name    string
				changes int
				every   time.Duration // pause between changes of others; 0 means none
			}{{"lone", lone, 0}, {"busy", busy, 10 * time.Millisecond}} {
				b.Run(load.name, func(b *testing.B) {
					stop := w.disturb(load.every)
					before, began := w.proxy.cpuTime(), w.others.Load()
					var all []time.Duration
					for range load.changes {
						all = append(all, w.follow())
						pause.For(b.Context(), 100*time.Millisecond) // nothing waits any more
					}
					changes := time.Duration(w.others.Load()-began) + time.Duration(len(all))
					cpu := (w.proxy.cpuTime() - before) / changes
					stop()
					slices.Sort(all)
					for unit, d := range map[string]time.Duration{"ms": all[len(all)/2], "p99-ms": all[min(len(all)-1, len(all)*99/100)], "cpu-ms": cpu} {
						b.ReportMetric(float64(d)/float64(time.Millisecond), unit)
					}
					b.ReportMetric(0, "ns/op")
				})
			}
			b.Run("killed", func(b *testing.B) {
				var all []time.Duration
				stop := w.load()
				for range min(lone, 5) {
					w.proxy.kill()
					w.turn()
					began := time.Now()
					w.start()
					w.reach()
					all = append(all, time.Since(began))
				}
				connections, failed := stop()
				slices.Sort(all)
				b.ReportMetric(float64(all[len(all)/2])/float64(time.Millisecond), "ms")
				b.ReportMetric(float64(connections), "connections")
				b.ReportMetric(float64(len(failed)), "failed")
				b.ReportMetric(0, "ns/op")
				if len(failed) > 0 {
					b.Errorf("%d of %d connections failed while nodeproxy was killed and started again: %v", len(failed), connections, failed[0])
				}
			})
		})
	}
}

// watched is nodeproxy between an API server and a client.
type watched struct {
	*small

	api    *apitest.Server
	proxy  *proxyProcess
	state  string // its folder
	n, pod int
	others atomic.Int64 // changes of other Services
}

func newWatched(b *testing.B, n int) *watched {
	b.Helper()
	w := &watched{small: newSmall(b), n: n, pod: 1}
	listener, err := w.node.Listen(b.Context(), "tcp", "127.0.0.1:6443")
	netnstest.Check(b, err)
	w.api = apitest.New(b, apitest.Options{Listener: listener, WatchList: true, Protobuf: true})
	w.put(thisNode + "---\n" + webService + "---\n" + webSlices(1))
	for i := range n {
		w.api.Put(b, proxiertest.Service("default", "other-"+strconv.Itoa(i), proxiertest.ClusterIPs(otherAddr("10.97.0.0", i)), proxiertest.Port("", v1.ProtocolTCP, 80)), w.other(i, 0))
	}
	w.state = b.TempDir()
	w.start()
	w.proxy.waitHealthy()
	poll.Until(b, "the first connection", func() bool { return w.ask(netip.MustParseAddrPort(vip4), netns.AskOptions{}) == "pod-1" })
	return w
}

// otherAddr returns an address of another Service or endpoint.
func otherAddr(first string, i int) string {
	base := netip.MustParseAddr(first).As4()
	return netip.AddrFrom4([4]byte{base[0], base[1] + byte(i>>16), byte(i >> 8), byte(i)}).String()
}

// other is a slice of another Service. One of its endpoints differs with the turn.
func (w *watched) other(i, turn int) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{proxiertest.SlicePort("", v1.ProtocolTCP, 8080)}
	for e := range 10 {
		if e == 0 {
			e = 10 + turn
		}
		options = append(options, proxiertest.Endpoint(otherAddr("10.128.0.0", 12*i+e), proxiertest.OnNode("node-2")))
	}
	return proxiertest.Slice("default", "other-"+strconv.Itoa(i), discovery.AddressTypeIPv4, options...)
}

func (w *watched) put(text string) {
	w.t.Helper()
	var all []runtime.Object
	for _, o := range objects(w.t, text) {
		all = append(all, o.Value)
	}
	w.api.Put(w.t, all...)
}

// disturb changes other Services until stop is called.
func (w *watched) disturb(every time.Duration) (stop func()) {
	if every == 0 {
		return func() {}
	}
	ended, tick := make(chan struct{}), time.NewTicker(every)
	quit := make(chan struct{})
	go func() {
		defer close(ended)
		for i := 0; ; i++ {
			select {
			case <-tick.C:
				w.api.Put(w.t, w.other(i%w.n, 1-i/w.n%2))
				w.others.Add(1)
			case <-quit:
				return
			}
		}
	}()
	return func() { tick.Stop(); close(quit); <-ended }
}

func (w *watched) start() {
	w.proxy = start(w.t, w.node, "--master=http://127.0.0.1:6443", "--state-dir="+w.state)
}

// load opens connections to the Service until stop is called, which returns how many there were, and
// why some failed.
func (w *watched) load() (stop func() (connections int64, failed []error)) {
	const clients = 4
	ctx, cancel := context.WithCancel(w.t.Context())
	var group sync.WaitGroup
	var count atomic.Int64
	errs := make([][]error, clients)
	for i := range clients {
		group.Go(func() {
			err := w.client.Do(func() error {
				for ctx.Err() == nil {
					count.Add(1)
					if _, err := connectOnce(w.t.Context()); err != nil {
						errs[i] = append(errs[i], err)
					}
					pause.For(ctx, 2*time.Millisecond)
				}
				return nil
			})
			if err != nil {
				errs[i] = append(errs[i], err)
			}
		})
	}
	return func() (int64, []error) {
		cancel()
		group.Wait()
		return count.Load(), slices.Concat(errs...)
	}
}

// connectOnce opens a connection from the thread's namespace, and returns who answered.
func connectOnce(ctx context.Context) (server string, err error) {
	flow, err := netns.OpenHere(ctx, "tcp", netip.MustParseAddrPort(vip4), netns.AskOptions{})
	if err != nil {
		return "", err
	}
	answer, err := flow.Ask(ctx)
	return answer.Server, errors.Join(err, flow.Close())
}

// turn moves the Service to the other pod.
func (w *watched) turn() {
	w.t.Helper()
	w.pod = 3 - w.pod
	w.put(webSlices(w.pod))
}

// reach opens connections until the Service's pod answers.
func (w *watched) reach() {
	w.t.Helper()
	netnstest.Check(w.t, w.client.Do(func() error {
		for {
			server, err := connectOnce(w.t.Context())
			if err != nil || server == "pod-"+strconv.Itoa(w.pod) {
				return err
			}
		}
	}))
}

// follow moves the Service to the other pod, and returns the time until a connection follows.
func (w *watched) follow() time.Duration {
	w.t.Helper()
	began := time.Now()
	w.turn()
	w.reach()
	return time.Since(began)
}

// cpuTime is that of nodeproxy, in the kernel's steps of 10 ms.
func (p *proxyProcess) cpuTime() time.Duration {
	p.t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	netnstest.Check(p.t, err)
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	var ticks int64
	for _, field := range fields[11:13] { // utime and stime of proc_pid_stat(5)
		n, err := strconv.ParseInt(field, 10, 64)
		netnstest.Check(p.t, err)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
