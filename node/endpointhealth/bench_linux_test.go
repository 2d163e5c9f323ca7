package endpointhealth_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// benchEndpoints are checked every 10 seconds, the default.
const benchEndpoints = 1000

// BenchmarkThousandEndpoints measures checks of 1,000 endpoints of 100 Services over loopback. An operation is one
// check of each: ten seconds' work with the default interval. %core is the share of a core that this work takes
// then.
func BenchmarkThousandEndpoints(b *testing.B) {
	p := benchPlane(b)
	interval := time.Second
	if os.Getenv("SERVICEPLANE_BENCH_FULL") != "" {
		interval = 4 * time.Second
	}
	const here = "/proc/self/ns/net" // a namespace, as any other
	for _, c := range []struct {
		name  string
		probe endpointhealth.Probe
		netNS string
	}{
		{"tcp", endpointhealth.TCPProbe{}, ""},
		{"http", endpointhealth.HTTPProbe{}, ""},
		{"tcp/namespace", endpointhealth.TCPProbe{}, here},
		{"http/namespace", endpointhealth.HTTPProbe{}, here},
	} {
		b.Run(c.name, func(b *testing.B) {
			checker, err := endpointhealth.New(endpointhealth.Options{
				NetNS: c.netNS, Rate: 1_000_000, Choose: always(endpointhealth.CheckPolicy{Probe: c.probe, Interval: interval, Timeout: interval}),
			})
			if err != nil {
				b.Fatal(err)
			}
			defer poll.Background(b, func(ctx context.Context) error { return checker.Run(ctx, p) })()
			poll.Until(b, "all are checked", func() bool { return checker.Status().Checks > benchEndpoints })
			b.ResetTimer()
			before, cpu := checker.Status().Checks, cpuTime(b)
			for checker.Status().Checks-before < uint64(b.N)*benchEndpoints {
				<-time.After(interval / 10)
			}
			done := checker.Status()
			perCheck := float64(cpuTime(b)-cpu) / float64(done.Checks-before)
			if done.Failures+done.Untested > 0 || done.Endpoints != benchEndpoints {
				b.Errorf("status %+v", done)
			}
			b.ReportMetric(100*perCheck*benchEndpoints/float64(10*time.Second), "%core")
			b.ReportMetric(perCheck/1000, "µs/check")
		})
	}
}

// benchPlane has 100 Services of 10 endpoints each, which are servers at 127.0.0.0/8.
func benchPlane(b *testing.B) *plane {
	b.Helper()
	tracker, err := changetracker.New(changetracker.Options{ObjectOptions: changetracker.ObjectOptions{LoopbackEndpoints: true}})
	if err != nil {
		b.Fatal(err)
	}
	p := &plane{tracker: tracker, states: map[v1.IPFamily]*changetracker.State{}}
	port := startServer(b)
	for s := range benchEndpoints / 10 {
		service := fmt.Sprintf("web-%d", s)
		tracker.Services.Update(nil, proxiertest.Service("default", service, proxiertest.ClusterIPs(fmt.Sprintf("10.96.1.%d", s)), proxiertest.Port("http", v1.ProtocolTCP, 80)))
		parts := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, port)}
		for e := range 10 {
			parts = append(parts, proxiertest.Endpoint(fmt.Sprintf("127.0.%d.%d", s+1, e+1)))
		}
		tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice("default", service, discovery.AddressTypeIPv4, parts...), false)
	}
	p.sync()
	return p
}

const serverVariable = "ENDPOINTHEALTH_TEST_SERVER"

// startServer starts the server in a process of its own, so that its time does not count.
func startServer(b *testing.B) (port int32) {
	b.Helper()
	server := exec.CommandContext(b.Context(), os.Args[0], "-test.run=^TestServer$")
	server.Env = append(os.Environ(), serverVariable+"=1")
	server.Stderr = os.Stderr
	out, err := server.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := server.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = server.Process.Kill(); _ = server.Wait() })
	if _, err := fmt.Fscanln(out, &port); err != nil {
		b.Fatalf("the server does not say its port: %v", err)
	}
	return port
}

// TestServer is the process that startServer starts.
func TestServer(t *testing.T) {
	if os.Getenv(serverVariable) == "" {
		return // it is for the benchmark
	}
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(os.Stdout, netip.MustParseAddrPort(l.Addr().String()).Port())
	answer(l)
}

// answer answers each request with an empty page, and each connection without one with nothing.
func answer(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			if n, _ := conn.Read(make([]byte, 256)); n > 0 {
				_, _ = conn.Write([]byte("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"))
			}
			_ = conn.Close()
		}()
	}
}

// cpuTime is what the process has used, in user and system mode.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
