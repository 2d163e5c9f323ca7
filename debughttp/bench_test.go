package debughttp_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
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

// BenchmarkServices searches 10,000 Services with 5 endpoints each. The budget is
// 100 ms for any search.
func BenchmarkServices(b *testing.B) {
	p := newProxy(b)
	for i := range 10_000 {
		p.OnServiceAdd(numberedService(i))
		p.OnEndpointSliceAdd(numberedSlice(i, 5))
	}
	p.run(b)
	p.sync(b)
	h := debughttp.Handler(p)
	for name, query := range map[string]string{
		"everything": "", "one name": "service-07777", "no name": "nothing", "one endpoint": "10.130.30.97", "last page": "&offset=9900",
		"most": "&limit=1000",
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, request(http.MethodGet, "/services?q="+query))
				if w.Code != http.StatusOK {
					b.Fatalf("status %d, want 200", w.Code)
				}
			}
		})
	}
}
