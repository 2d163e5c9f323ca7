package userspace

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// benchFull is an environment variable for long runs and large sizes. Without it the
// benchmarks only show that they work.
const benchFull = "SERVICEPLANE_BENCH_FULL"

// BenchmarkProxies compares proxies in front of the same server. Each round measures all
// of them. It reports medians, also of the ratios within a round, of the bytes per second
// of one connection, and of the connections per second, each with a request and an
// answer. "direct" is without a proxy, "limit" a loop of splice(2) for one connection,
// and "nginx" its stream module, with one worker and with two. Where other programs run
// too, the CPU time of a connection is a better measure than the time that passes.
//
// Budgets: 0.8 of the limit, and 0.6 of nginx's connections.
func BenchmarkProxies(b *testing.B) {
	source, answer := startServer(b, "source"), startServer(b, "answer")
	_, ours := benchEngine(b, web(v1.ProtocolTCP, source), web(v1.ProtocolTCP, answer))
	n1, cpu1 := startNginx(b, 1, source, answer)
	n2, cpu2 := startNginx(b, 2, source, answer)
	b.Run("throughput", func(b *testing.B) {
		ways := []way{{to: source, name: "direct"}, {to: startServer(b, "splice", source), name: "limit"}, {ours[0], "ours", cpuTime}, {n1[0], "nginx", cpu1}, {n2[0], "nginx2", cpu2}}
		c := contest{ways: ways, unit: "MB/s", scale: 1e-6}
		c.run(b, func(w way) []any { return []any{"pull", w.to} })
	})
	for _, clients := range []int{16, 64} {
		b.Run(fmt.Sprintf("connections/clients=%d", clients), func(b *testing.B) {
			ways := []way{{to: answer, name: "direct"}, {ours[1], "ours", cpuTime}, {n1[1], "nginx", cpu1}, {n2[1], "nginx2", cpu2}}
			c := contest{ways: ways, unit: "conn/s", scale: 1}
			c.run(b, func(w way) []any { return []any{"ask", w.to, clients} })
			for _, w := range ways[1:] {
				b.ReportMetric(c.cpu[w.name].Seconds()*1e6/c.total[w.name], w.name+"-cpu-µs/conn")
			}
		})
	}
}

// way is one of the compared addresses of a server.
type way struct {
	to   netip.AddrPort
	name string
	cpu  func() time.Duration // of the proxy; nil for none
}

// contest measures ways in rounds.
type contest struct {
	ways  []way
	unit  string
	scale float64

	figures map[string][]float64
	total   map[string]float64 // of bytes or connections
	cpu     map[string]time.Duration
}

// run measures rounds, with the part for each way, and reports the medians.
func (c *contest) run(b *testing.B, part func(way) []any) {
	b.Helper()
	length := 200 * time.Millisecond
	if os.Getenv(benchFull) == "1" {
		length = time.Second
	}
	c.figures, c.total, c.cpu = map[string][]float64{}, map[string]float64{}, map[string]time.Duration{}
	for range b.N {
		for _, w := range c.ways {
			if w.cpu == nil {
				w.cpu = func() time.Duration { return 0 }
			}
			before := w.cpu()
			figure := startMeter(b, append(part(w), int64(length))...)
			c.cpu[w.name] += w.cpu() - before
			c.figures[w.name] = append(c.figures[w.name], figure*c.scale)
			c.total[w.name] += figure * length.Seconds() * 5 / 4 // including the warm-up
		}
	}
	for _, w := range c.ways {
		b.ReportMetric(median(c.figures[w.name]), w.name+"-"+c.unit)
		if w.name == "limit" || w.name == "nginx" || w.name == "nginx2" {
			b.ReportMetric(c.ratio(w.name), "ours/"+w.name)
		}
	}
	b.ReportMetric(0, "ns/op")
}

// ratio returns the median of the ratios between the engine and another way in a round,
// since the speed of a shared machine changes from round to round.
func (c *contest) ratio(other string) float64 {
	var ratios []float64
	for i, figure := range c.figures[other] {
		ratios = append(ratios, c.figures["ours"][i]/figure)
	}
	return median(ratios)
}

func median(figures []float64) float64 {
	sorted := slices.Sorted(slices.Values(figures))
	return sorted[len(sorted)/2]
}

// cpuTime returns the CPU time of this process, in which the engine is.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// benchEngine starts an engine with some Services, and returns their addresses.
func benchEngine(b *testing.B, services ...*desired.Service) (e *Engine, at []netip.AddrPort) {
	b.Helper()
	e, err := NewEngine(Config{}, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := e.Close(); err != nil {
			b.Errorf("close: %v", err)
		}
	})
	for i, s := range services {
		s.Name.Name = fmt.Sprintf("service-%d", i)
	}
	if _, err := e.Apply(b.Context(), desired.Update{Family: v1.IPv4Protocol, Full: true, Changes: desired.ChangesTo(services...)}); err != nil {
		b.Fatalf("apply: %v", err)
	}
	for _, site := range e.Sockets() {
		at = append(at, site.Addr)
	}
	return e, at
}

// startNginx starts nginx, and returns its address for each server, and what measures the
// CPU time of its workers. Its buffers are larger than by default, which makes it faster
// here.
func startNginx(b *testing.B, workers int, servers ...netip.AddrPort) (at []netip.AddrPort, cpu func() time.Duration) {
	b.Helper()
	program, err := exec.LookPath("nginx")
	if err != nil {
		lacksNginx(b, err)
	}
	var listeners string
	for _, server := range servers {
		to := freePort(b)
		at = append(at, to)
		listeners += fmt.Sprintf("  server { listen %v backlog=4096; proxy_pass %v; }\n", to, server)
	}
	config := filepath.Join(b.TempDir(), "nginx.conf")
	text := fmt.Sprintf(`%s
daemon off;
pid %s.pid;
error_log stderr crit;
worker_processes %d;
worker_rlimit_nofile 16384;
events { worker_connections 8192; }
stream {
  access_log off;
  proxy_buffer_size 64k;
%s}
`, streamModule(program), config, workers, listeners)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
	if out, err := exec.CommandContext(b.Context(), program, "-t", "-q", "-c", config, "-e", "stderr").CombinedOutput(); err != nil {
		lacksNginx(b, fmt.Errorf("%w: %s", err, out))
	}
	startPart(b, "nginx", program, "-c", config, "-e", "stderr")
	for _, to := range at {
		awaitListener(b, to)
	}
	return at, func() time.Duration { return workersTime(b, config+".pid") }
}

// workersTime returns the CPU time of the children of the process that a file names.
func workersTime(b *testing.B, pidFile string) (total time.Duration) {
	b.Helper()
	read := func(format string, pid any) []string {
		text, err := os.ReadFile(fmt.Sprintf(format, pid))
		if err != nil {
			b.Fatalf("read the CPU time of nginx: %v", err)
		}
		return strings.Fields(string(text))
	}
	for _, worker := range read("/proc/%[1]v/task/%[1]v/children", read("%v", pidFile)[0]) {
		running, err := time.ParseDuration(read("/proc/%v/schedstat", worker)[0] + "ns")
		if err != nil {
			b.Fatalf("parse the CPU time of nginx: %v", err)
		}
		total += running
	}
	return total
}

// streamModule loads the module if it is not built in.
func streamModule(program string) string {
	about, err := exec.Command(program, "-V").CombinedOutput()
	dir := regexp.MustCompile(`--modules-path=(\S+)`).FindSubmatch(about)
	if err != nil || dir == nil {
		return ""
	}
	module := filepath.Join(string(dir[1]), "ngx_stream_module.so")
	if _, err := os.Stat(module); err != nil {
		return ""
	}
	return "load_module " + module + ";"
}

// lacksNginx skips the benchmark if nginx, or its module, is not installed.
func lacksNginx(b *testing.B, err error) {
	b.Helper()
	if os.Getenv(netnstest.RequireKernel) == "1" {
		b.Fatalf("nginx and its stream module are required: %v", err)
	}
	b.Skipf("needs nginx and its stream module, in Debian the packages nginx and libnginx-mod-stream: %v", err)
}

func freePort(b *testing.B) netip.AddrPort {
	b.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	return addrPort(l.Addr())
}

func awaitListener(b *testing.B, at netip.AddrPort) {
	b.Helper()
	poll.Nil(b, fmt.Sprint("a listener at ", at), func() error {
		conn, err := net.Dial("tcp4", at.String())
		if err == nil {
			_ = conn.Close()
		}
		return err
	})
}
