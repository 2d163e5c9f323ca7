package debughttp_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// proxy is a running Proxier with recording engines.
type proxy struct {
	*proxier.Proxier

	engines map[v1.IPFamily]*proxiertest.RecordingEngine
}

// newProxy returns a Proxier of both IP families, which does not run yet.
func newProxy(tb testing.TB, change ...func(*proxier.Config, *proxier.Deps)) *proxy {
	tb.Helper()
	config := proxier.Config{
		Node: changetracker.Node{
			Name: "node-1", Zone: "zone-a",
			Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")},
		},
		Runner:     runner.Options{MinInterval: time.Millisecond, Burst: 1000},
		Masquerade: proxier.Masquerade{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}},
	}
	deps := proxier.Deps{}
	for _, c := range change {
		c(&config, &deps)
	}
	p := &proxy{engines: map[v1.IPFamily]*proxiertest.RecordingEngine{v1.IPv4Protocol: {}, v1.IPv6Protocol: {}}}
	engines := map[v1.IPFamily]proxier.Engine{}
	for family, engine := range p.engines {
		engines[family] = engine
	}
	var err error
	if p.Proxier, err = proxier.New(config, deps, engines); err != nil {
		tb.Fatal(err)
	}
	return p
}

// run runs the proxy until the test ends, with complete first lists.
func (p *proxy) run(tb testing.TB) {
	tb.Helper()
	proxiertest.Run(tb, p)
}

// sync waits until all changes are programmed.
func (p *proxy) sync(tb testing.TB) {
	tb.Helper()
	if err := p.Sync(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

// webService returns a Service with every kind of frontend.
func webService() *v1.Service {
	return proxiertest.Service("shop", "web",
		proxiertest.ClusterIPs("10.96.0.10", "fd00:96::10"),
		proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080),
		proxiertest.LoadBalancer("198.51.100.10"), proxiertest.ExternalIPs("198.51.100.20"),
		proxiertest.SourceRanges("203.0.113.0/24"), proxiertest.ExternalPolicyLocal(),
		proxiertest.ClientAffinity(time.Hour))
}

// webSlice has three endpoints; first changes the one on this node.
func webSlice(first ...proxiertest.EndpointOption) *discovery.EndpointSlice {
	return proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint("10.244.1.5", append(first, proxiertest.OnNode("node-1"), proxiertest.InZone("zone-a"))...),
		proxiertest.Endpoint("10.244.2.5", proxiertest.OnNode("node-2"), proxiertest.InZone("zone-b")),
		proxiertest.Endpoint("10.244.2.6", proxiertest.OnNode("node-2"), proxiertest.InZone("zone-b"), proxiertest.NotServing()))
}

func webSlice6() *discovery.EndpointSlice {
	return proxiertest.Slice("shop", "web", discovery.AddressTypeIPv6,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint("fd00:244:1::5", proxiertest.OnNode("node-1")))
}

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

// request returns a request for a path at localhost, or for a URL.
func request(method, target string) *http.Request {
	r := httptest.NewRequest(method, target, http.NoBody)
	if strings.HasPrefix(target, "/") {
		r.Host = "localhost"
	}
	return r
}

// get sends a request to a Handler, checks the common headers, and returns the response.
func get(tb testing.TB, h http.Handler, target string, wantStatus int) (answer map[string]any) {
	tb.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, request(http.MethodGet, target))
	if w.Code != wantStatus {
		tb.Fatalf("GET %s = %d %s, want %d", target, w.Code, w.Body, wantStatus)
	}
	for name, want := range map[string]string{
		"Content-Type": "application/json", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store",
	} {
		if got := w.Header().Get(name); got != want {
			tb.Errorf("GET %s: %s is %q, want %q", target, name, got, want)
		}
	}
	decoder := json.NewDecoder(w.Body)
	decoder.UseNumber()
	if err := decoder.Decode(&answer); err != nil {
		tb.Fatalf("GET %s: %v", target, err)
	}
	return answer
}

// at returns a part of a response: a step is the name of a field or the number of an item.
func at(tb testing.TB, value any, path ...any) any {
	tb.Helper()
	for _, step := range path {
		switch step := step.(type) {
		case string:
			object, ok := value.(map[string]any)
			if !ok {
				tb.Fatalf("%v: no object at %v: %v", path, step, value)
			}
			value = object[step]
		case int:
			items, ok := value.([]any)
			if !ok || step >= len(items) {
				tb.Fatalf("%v: no item %d in %v", path, step, value)
			}
			value = items[step]
		}
	}
	return value
}

// compact returns a value as JSON, for comparison.
func compact(tb testing.TB, value any) string {
	tb.Helper()
	var text strings.Builder
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		tb.Fatal(err)
	}
	return strings.TrimSpace(text.String())
}

func wantAt(tb testing.TB, answer any, want string, path ...any) {
	tb.Helper()
	if got := compact(tb, at(tb, answer, path...)); got != want {
		tb.Errorf("%v is %s, want %s", path, got, want)
	}
}

var _ debughttp.Proxy = (*proxy)(nil)
