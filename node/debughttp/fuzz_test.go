package debughttp_test

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/debughttp"
)

// FuzzQuery: no request is an error of the server, and every answer to a known path is JSON.
func FuzzQuery(f *testing.F) {
	p := newProxy(f)
	p.run(f)
	p.OnServiceAdd(webService())
	p.OnEndpointSliceAdd(webSlice())
	p.sync(f)
	handler := debughttp.Handler(p)
	paths := []string{"status", "services", "service", "namespaces", "syncs", "explain", "state", "verify", "counts", "rules", "programmed", "report"}
	for i, query := range []string{
		"", "text=web&limit=1&offset=0", "namespace=default&name=web&family=IPv4", "limit=9999999999999999999",
		"protocol=tcp&source=10.0.0.1&destination=10.96.0.1:80&origin=pod&interface=eth0", "%zz=1;a=b", "name=%00%ff",
	} {
		for j := range paths {
			f.Add(uint8(i+j), query)
		}
	}
	f.Fuzz(func(t *testing.T, path uint8, query string) {
		r := httptest.NewRequest(http.MethodGet, "/"+paths[int(path)%len(paths)], nil)
		r.Host, r.URL.RawQuery = "localhost", query
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if w.Code >= http.StatusInternalServerError && w.Code != http.StatusNotImplemented || !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s?%s: status %d: %s", r.URL.Path, query, w.Code, w.Body)
		}
	})
}

// FuzzTrace: what reaches the Tracer is valid and within bounds, and everything else is an error of
// the client.
func FuzzTrace(f *testing.F) {
	for _, query := range []string{
		"protocol=tcp&source=10.0.0.1&destination=10.96.0.1:80&origin=pod&packets=3&timeout=5s&send=true&netns=pod",
		"protocol=UDP&source=::1&destination=[::1]:53&origin=node&timeout=-1s", "protocol=SCTP&source=10.0.0.1&destination=10.96.0.1:9&origin=outside&send=1",
		"protocol=tcp&source=10.0.0.1&destination=[::1]:80&origin=pod", "netns=../../x", "packets=99999999999999999999", "timeout=9999h", "%zz", "",
	} {
		f.Add("POST", query, "application/json", "")
		f.Add("GET", query, "text/plain", "https://example.com")
	}
	f.Fuzz(func(t *testing.T, method, query, contentType, origin string) {
		reached := false
		handler := debughttp.Handler(&fakeSource{}, debughttp.WithTracer(func(_ context.Context, r debughttp.TraceRequest) (debughttp.TraceAnswer, error) {
			reached = true
			if err := r.Packet.Validate(); err != nil || r.Packets < 1 || r.Packets > 100 || r.Timeout <= 0 || r.Timeout > 5*time.Minute ||
				r.NetNS != "" && !r.Send || len(r.NetNS) > 256 || r.Send && r.Packet.Protocol == desired.SCTP {
				t.Errorf("the Tracer gets %+v: %v", r, err)
			}
			return debughttp.TraceAnswer{}, nil
		}))
		r := httptest.NewRequest(http.MethodPost, "/trace", nil)
		r.Method, r.Host, r.URL.RawQuery = method, "localhost", query
		r.Header.Set("Content-Type", contentType)
		if origin != "" {
			r.Header.Set("Origin", origin)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if reached != (w.Code == http.StatusOK) || reached && method != http.MethodPost || w.Code >= http.StatusInternalServerError || !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s /trace?%s: reached %v, status %d: %s", method, query, reached, w.Code, w.Body)
		}
	})
}

// FuzzHost: a request passes if its Host is a name of the list or an address, in any of the
// ways that a URL can have it, and no other does.
func FuzzHost(f *testing.F) {
	for _, host := range []string{"localhost:80", "node.example.", "NODE.example:1", "10.0.0.1", "[fd00::1]:80", "fd00::1", "evil.example", "[::1", "10.0.0.1.evil.example", ":80", "a:b:c"} {
		f.Add(host)
	}
	names := []string{"localhost", "node.example"}
	f.Fuzz(func(t *testing.T, host string) {
		passed := false
		next := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { passed = true })
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Host = host
		debughttp.KnownHosts(next, names...).ServeHTTP(httptest.NewRecorder(), r)
		u, err := url.Parse("http://" + host + "/")
		if err != nil || u.Host != host || host == "" {
			return // no browser sends it
		}
		name := strings.ToLower(strings.TrimSuffix(u.Hostname(), "."))
		_, err = netip.ParseAddr(name)
		if want := err == nil || net.ParseIP(name) != nil || slices.Contains(names, name); passed != want {
			t.Errorf("Host %q: passed %v, want %v", host, passed, want)
		}
	})
}
