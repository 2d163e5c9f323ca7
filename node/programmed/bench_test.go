package programmed_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

const services = 10000

// programs runs a Provider with so many Services of 10 endpoints each, some of which fail.
func programs(b *testing.B, failing int) *proxier.Proxier {
	b.Helper()
	engine := &proxiertest.RecordingEngine{}
	p, err := proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}, Runner: runner.Options{MinInterval: runner.Unlimited}}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		b.Fatal(err)
	}
	for i := range services {
		name := "s" + strconv.Itoa(i)
		if i < failing {
			engine.Refuse(portOf(types.NamespacedName{Namespace: "shop", Name: name}), errors.New("no room"))
		}
		ip := "10.96." + strconv.Itoa(i/250) + "." + strconv.Itoa(1+i%250)
		p.OnServiceAdd(proxiertest.Service("shop", name, proxiertest.ClusterIPs(ip), proxiertest.Port("http", v1.ProtocolTCP, 80)))
		p.OnEndpointSliceAdd(benchSlice(i, 10))
	}
	proxiertest.Run(b, p)
	poll.Until(b, "everything is programmed", func() bool {
		s := p.Status().Families[v1.IPv4Protocol]
		return s.Synced && len(s.Failed) == failing && s.ServicePorts > 0
	})
	return p
}

func benchAddr(service, endpoint int) netip.Addr {
	n := 10*service + endpoint
	return netip.AddrFrom4([4]byte{10, 128 + byte(n>>16), byte(n >> 8), byte(n)})
}

func benchSlice(service, endpoints int) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, 8080)}
	for i := range endpoints {
		options = append(options, proxiertest.Endpoint(benchAddr(service, i).String()))
	}
	return proxiertest.Slice("shop", "s"+strconv.Itoa(service), discovery.AddressTypeIPv4, options...)
}

// BenchmarkSends measures the time of an answer about an endpoint, among 100,000: the first one, the next one, and
// one after a change of a Service. docs/PROGRAMMED.md has the result.
func BenchmarkSends(b *testing.B) {
	p := programs(b, 0)
	asks := func(b *testing.B, addr netip.Addr) {
		b.Helper()
		if got := p.Sends(netip.AddrPortFrom(addr, 8080)); len(got) != 1 {
			b.Fatalf("Sends(%v) = %v, want one Service", addr, got)
		}
	}
	b.Run("first", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			asks(b, benchAddr(i%services, i/services%9))
		}
	})
	b.Run("again", func(b *testing.B) {
		asks(b, benchAddr(1, 1))
		for b.Loop() {
			asks(b, benchAddr(1, 1))
		}
	})
	b.Run("after-change", func(b *testing.B) {
		asks(b, benchAddr(1, 1))
		for i := 0; b.Loop(); i++ {
			b.StopTimer()
			p.OnEndpointSliceUpdate(nil, benchSlice(1, 9+i%2))
			if err := proxiertest.Sync(b.Context(), p); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			asks(b, benchAddr(1, 1))
		}
	})
}

// BenchmarkHandler measures the time of a node's answer, from the Status of a real Provider with 10,000 Services,
// with no failed service port and with 100. docs/PROGRAMMED.md has the result.
func BenchmarkHandler(b *testing.B) {
	for _, failing := range []int{0, 100} {
		b.Run("failed="+strconv.Itoa(failing), func(b *testing.B) {
			p := programs(b, failing)
			handler := programmed.Handler("node-1", p)
			request := httptest.NewRequest(http.MethodGet, "/programmed?service=shop/s1", http.NoBody)
			b.ReportAllocs()
			for b.Loop() {
				w := httptest.NewRecorder()
				if handler.ServeHTTP(w, request); w.Code != http.StatusOK {
					b.Fatal(w.Code)
				}
			}
		})
	}
}
