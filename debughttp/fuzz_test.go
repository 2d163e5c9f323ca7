package debughttp_test

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/debughttp"
)

// FuzzQuery: no request is an error of the server, and every answer to a known path is JSON.
func FuzzQuery(f *testing.F) {
	p := newProxy(f)
	p.run(f)
	p.OnServiceAdd(webService())
	p.OnEndpointSliceAdd(webSlice())
	p.sync(f)
	handler := debughttp.Handler(p)
	paths := []string{"status", "services", "service", "namespaces", "syncs", "explain", "state"}
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
		if w.Code >= http.StatusInternalServerError || !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s?%s: status %d: %s", r.URL.Path, query, w.Code, w.Body)
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
