package debughttp_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/debughttp"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// numberedService returns one of many Services.
func numberedService(i int) *v1.Service {
	return proxiertest.Service("load", fmt.Sprintf("service-%05d", i),
		proxiertest.ClusterIPs(fmt.Sprintf("10.97.%d.%d", i>>8, i&255)), proxiertest.Port("http", v1.ProtocolTCP, 80))
}

// numberedSlice returns the endpoints of one of many Services.
func numberedSlice(i, endpoints int) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, 8080)}
	for n := range endpoints {
		options = append(options, proxiertest.Endpoint(fmt.Sprintf("10.%d.%d.%d", 128+n, i>>8, i&255)))
	}
	return proxiertest.Slice("load", fmt.Sprintf("service-%05d", i), discovery.AddressTypeIPv4, options...)
}

// BenchmarkServices lists Services with 5 endpoints each. The budgets at 30,000 are 300 ms for the
// first request, which makes the index, and 30 ms for any other one.
func BenchmarkServices(b *testing.B) {
	for _, services := range []int{10_000, 30_000} {
		b.Run(fmt.Sprintf("N=%d", services), func(b *testing.B) { benchmarkServices(b, services) })
	}
}

func benchmarkServices(b *testing.B, services int) {
	if services > 10_000 && os.Getenv("SERVICEPLANE_BENCH_FULL") == "" {
		b.Skip("set SERVICEPLANE_BENCH_FULL=1 for large clusters")
	}
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
			for b.Loop() {
				list(b, h, query)
			}
		})
	}
}
