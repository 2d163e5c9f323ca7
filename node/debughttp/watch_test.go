package debughttp_test

import (
	"bufio"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// A watch sends a line for each change, with the endpoints that came and went, and none for what stays.
func TestWatch(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	p.run(t)
	p.OnServiceAdd(webService())
	p.OnEndpointSliceAdd(webSlice())
	p.sync(t)
	server := httptest.NewServer(debughttp.Handler(p))
	t.Cleanup(server.Close)
	response, err := http.Get(server.URL + "/watch")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() }) // before the server, which waits for it
	lines := bufio.NewScanner(response.Body)
	next := func() (event map[string]any) {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("the watch ends: %v", lines.Err())
		}
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			t.Fatal(err)
		}
		return event
	}
	if response.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Errorf("headers are %v, want NDJSON", response.Header)
	}
	wantAt(t, next(), `"watching"`, "type")

	idle := proxiertest.Service("shop", "idle", proxiertest.ClusterIPs("10.96.0.11"), proxiertest.Port("", "TCP", 80))
	p.OnServiceAdd(idle)
	p.sync(t)
	added := next()
	wantAt(t, added, `"added"`, "type")
	wantAt(t, added, `"idle"`, "name")
	wantAt(t, added, `"10.96.0.11"`, "servicePort", "clusterIP")

	p.OnEndpointSliceUpdate(nil, proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", "TCP", 8080),
		proxiertest.Endpoint("10.244.1.5", proxiertest.Terminating(), proxiertest.OnNode("node-1"), proxiertest.InZone("zone-a")),
		proxiertest.Endpoint("10.244.2.5", proxiertest.OnNode("node-2"), proxiertest.InZone("zone-b"))))
	p.sync(t)
	changed := next()
	wantAt(t, changed, `"changed"`, "type")
	wantAt(t, changed, `"web"`, "name")
	wantAt(t, changed, `"10.244.1.5:8080"`, "endpointsAdded", 0, "address")
	wantAt(t, changed, `"terminating"`, "endpointsAdded", 0, "state")
	if all := at(t, changed, "endpointsAdded").([]any); len(all) != 1 {
		t.Errorf("endpointsAdded has %v, want one", all)
	}
	wantAt(t, changed, `["10.244.2.6:8080"]`, "endpointsRemoved")

	p.OnServiceDelete(idle)
	p.sync(t)
	removed := next()
	wantAt(t, removed, `"removed"`, "type")
	wantAt(t, removed, `"idle"`, "name")
}

// The answer to HEAD has no body, and ends.
func TestWatchHead(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	debughttp.Handler(newProxy(t)).ServeHTTP(w, request(http.MethodHead, "/watch"))
	if w.Code != http.StatusOK || w.Body.Len() > 0 || !strings.Contains(w.Header().Get("Content-Type"), "ndjson") {
		t.Errorf("HEAD = %d %q %v, want headers only", w.Code, w.Body, w.Header())
	}
}

// The state has all Services with their endpoints, or those of a namespace.
func TestState(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	h := debughttp.Handler(p, debughttp.Version("v1"))
	wantAt(t, get(t, h, "/state", http.StatusOK), `[]`, "services")
	p.run(t)
	p.OnServiceAdd(webService())
	p.OnEndpointSliceAdd(webSlice())
	p.OnServiceAdd(proxiertest.Service("other", "idle", proxiertest.ClusterIPs("10.96.0.11"), proxiertest.Port("", "TCP", 80)))
	p.sync(t)
	all := get(t, h, "/state", http.StatusOK)
	wantAt(t, all, `"node-1"`, "node")
	wantAt(t, all, `"idle"`, "services", 0, "name")
	wantAt(t, all, `[]`, "services", 0, "servicePorts", 0, "endpoints")
	wantAt(t, all, `30080`, "services", 1, "servicePorts", 0, "nodePort")
	wantAt(t, all, `{"address":"10.244.2.6:8080","state":"not ready"}`, "services", 1, "servicePorts", 0, "endpoints", 2)
	wantAt(t, all, `"IPv6"`, "services", 1, "servicePorts", 1, "family")
	some := get(t, h, "/state?namespace=shop", http.StatusOK)
	wantAt(t, some, `"web"`, "services", 0, "name")
	wantAt(t, get(t, h, "/status", http.StatusOK), `"v1"`, "version")
}
