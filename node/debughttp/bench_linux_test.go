package debughttp_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/node/debughttp"
)

// BenchmarkServices lists Services with 5 endpoints each. The budgets at 30,000 are 300 ms for the
// first request, which makes the index, and 30 ms for any other one. cpu-ms is the time of all
// cores, with the collection of garbage.
func BenchmarkServices(b *testing.B) {
	sizes := []int{10_000}
	if os.Getenv("SERVICEPLANE_BENCH_FULL") != "" {
		sizes = append(sizes, 30_000)
	}
	for _, services := range sizes {
		b.Run(fmt.Sprintf("N=%d", services), func(b *testing.B) { benchmarkServices(b, services) })
	}
}

func benchmarkServices(b *testing.B, services int) {
	p := newProxy(b)
	for i := range services {
		p.OnServiceAdd(numberedService(i))
		p.OnEndpointSliceAdd(numberedSlice(i, 5))
	}
	p.run(b)
	p.sync(b)
	list := func(b *testing.B, h http.Handler, query string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, request(http.MethodGet, "/services?q="+query))
		if w.Code != http.StatusOK {
			b.Fatalf("status %d, want 200", w.Code)
		}
	}
	b.Run("first", func(b *testing.B) {
		b.ReportAllocs()
		defer reportCPU(b)()
		for b.Loop() {
			list(b, debughttp.Handler(p), "")
		}
	})
	h := debughttp.Handler(p)
	b.Run("changed", func(b *testing.B) {
		b.ReportAllocs()
		list(b, h, "")
		for i := 0; b.Loop(); i++ {
			b.StopTimer()
			p.OnEndpointSliceUpdate(nil, numberedSlice(i%services, 3+i%2))
			p.sync(b)
			b.StartTimer()
			list(b, h, "")
		}
	})
	for name, query := range map[string]string{
		"everything": "", "one name": "service-07777", "no name": "nothing", "one endpoint": "10.130.30.97", "last page": "&offset=9900",
		"most": "&limit=1000", "filter": "&filter=no-endpoints",
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			defer reportCPU(b)()
			for b.Loop() {
				list(b, h, query)
			}
		})
	}
}

func reportCPU(b *testing.B) (done func()) {
	b.Helper()
	before := cpuTime(b)
	return func() { b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/1000/float64(b.N), "cpu-ms") }
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
