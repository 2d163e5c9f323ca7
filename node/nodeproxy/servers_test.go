package nodeproxy

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// TestTheMetricsServersPages: HC-40. Profiles need --profiling.
func TestTheMetricsServersPages(t *testing.T) {
	ask := func(path string, args ...string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		parse(t, args...).metricsPages(prometheus.NewRegistry()).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:10249"+path, nil))
		return w
	}
	for path, want := range map[string]string{"/proxyMode": "nftables", "/healthz": "ok"} {
		w := ask(path)
		if w.Body.String() != want || w.Header().Get("Content-Type") != "text/plain; charset=utf-8" || w.Header().Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s = %q with %v, want %q as plain text, nosniff", path, w.Body, w.Header(), want)
		}
	}
	for path, gate := range map[string]string{"/flagz": gateFlagz, "/statusz": gateStatusz} {
		with, without := ask(path), ask(path, "--feature-gates="+gate+"=false")
		if with.Code != http.StatusOK || !strings.Contains(with.Body.String(), "nodeproxy "+path[1:]+"\n") || without.Code != http.StatusNotFound {
			t.Errorf("%s: %d and %s, and %d with the gate off, want 200, the page and 404", path, with.Code, with.Body, without.Code)
		}
	}
	if got := ask("/statusz").Body.String(); !strings.Contains(got, "Paths: /configz /flagz /healthz /metrics /proxyMode\n") {
		t.Errorf("/statusz is %s, want the paths of the server", got)
	}
	for _, path := range []string{"/debug/pprof/", "/debug/pprof/profile?seconds=1", "/debug/pprof/heap"} {
		if got := ask(path).Code; got != http.StatusNotFound {
			t.Errorf("%s: code %d, want 404", path, got)
		}
	}
	for _, path := range []string{"/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/heap", "/metrics"} {
		if got := ask(path, "--profiling").Code; got != http.StatusOK {
			t.Errorf("%s: code %d, want 200", path, got)
		}
	}
}

// Unknown host names are refused, except by /healthz.
func TestUnknownHostNamesAreRefused(t *testing.T) {
	for _, c := range []struct {
		host, path string
		want       int
	}{
		{"evil.example:10249", "/metrics", http.StatusMisdirectedRequest},
		{"evil.example", "/configz", http.StatusMisdirectedRequest},
		{"evil.example", "/debug/pprof/heap", http.StatusMisdirectedRequest},
		{"evil.example", "/proxyMode", http.StatusMisdirectedRequest},
		{"evil.example", "/healthz", http.StatusOK},
		{"node-1.example:10249", "/metrics", http.StatusOK},
		{"localhost:10249", "/configz", http.StatusOK},
		{"[::1]:10249", "/metrics", http.StatusOK},
	} {
		w := httptest.NewRecorder()
		pages := parse(t, "--profiling", "--allowed-hosts=node-1.example").metricsPages(prometheus.NewRegistry())
		pages.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+c.host+c.path, nil))
		if w.Code != c.want {
			t.Errorf("%s of %s: %d, want %d", c.path, c.host, w.Code, c.want)
		}
	}
}

// The page /configz has the shape of kube-proxy's: HC-40.
func TestConfigz(t *testing.T) {
	w := httptest.NewRecorder()
	o := parse(t, "--cluster-cidr=10.244.0.0/16", "--nftables-min-sync-period=2s", "--conntrack-udp-timeout=77s", "--metrics-bind-address=192.0.2.1",
		"--nodeport-addresses=192.0.2.0/24", "--kubeconfig=/etc/kubeconfig", "--profiling", "--hostname-override=n", "--proxy-port-range=20000+5", "--feature-gates=KubeProxyIPVS=true")
	o.configz(w, nil)
	var got map[string]map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]map[string]any{"kubeproxy.config.k8s.io": {
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "nftables", "hostnameOverride": "n",
		"clientConnection": map[string]any{
			"kubeconfig": "/etc/kubeconfig", "acceptContentTypes": "", "contentType": "application/vnd.kubernetes.protobuf", "qps": 5.0, "burst": 10.0,
		},
		"logging": map[string]any{"format": "text", "flushFrequency": "5s", "verbosity": 0.0}, "featureGates": map[string]any{"KubeProxyIPVS": true},
		"bindAddress": "0.0.0.0", "bindAddressHardFail": false, "showHiddenMetricsForVersion": "", "oomScoreAdj": -999.0,
		"ipvs": map[string]any{
			"syncPeriod": "30s", "minSyncPeriod": "10ms", "scheduler": "rr", "excludeCIDRs": []any{}, "strictARP": false,
			"tcpTimeout": "0s", "tcpFinTimeout": "0s", "udpTimeout": "0s",
		},
		"winkernel":   map[string]any{"networkName": "", "sourceVip": "", "enableDSR": false, "rootHnsEndpointName": "", "forwardHealthCheckVip": false},
		"clusterCIDR": "10.244.0.0/16", "detectLocalMode": "ClusterCIDR", "nodePortAddresses": []any{"192.0.2.0/24"}, "portRange": "20000+5",
		"detectLocal":      map[string]any{"bridgeInterface": "", "interfaceNamePrefix": ""},
		"configSyncPeriod": "15m0s", "healthzBindAddress": "0.0.0.0:10256", "metricsBindAddress": "192.0.2.1:10249", "enableProfiling": true,
		"nftables": map[string]any{"masqueradeBit": 14.0, "masqueradeAll": false, "syncPeriod": "30s", "minSyncPeriod": "2s"},
		"iptables": map[string]any{"masqueradeBit": 14.0, "masqueradeAll": false, "syncPeriod": "30s", "minSyncPeriod": "1s", "localhostNodePorts": true},
		"conntrack": map[string]any{
			"maxPerCore": 32768.0, "min": 131072.0, "tcpEstablishedTimeout": "24h0m0s", "tcpCloseWaitTimeout": "1h0m0s", "tcpBeLiberal": false,
			"udpTimeout": "1m17s", "udpStreamTimeout": "0s",
		},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("/configz (-want +got):\n%s", diff)
	}
	if got := w.Header().Get("Content-Type"); got != "application/json" {
		t.Errorf("content type %q, want application/json", got)
	}
}

func TestTheURLOfACollectorGetsAPath(t *testing.T) {
	for text, want := range map[string]string{
		"http://127.0.0.1:4318":         "http://127.0.0.1:4318/v1/traces",
		"https://collector.example/":    "https://collector.example/v1/traces",
		"http://[::1]:4318/otlp/traces": "http://[::1]:4318/otlp/traces",
		"127.0.0.1:4318":                "",
		"grpc://127.0.0.1:4317":         "",
		"http:///v1/traces":             "",
	} {
		if got, err := traceURL(text); got != want || (err == nil) != (want != "") {
			t.Errorf("traceURL(%q) = %q, %v, want %q", text, got, err, want)
		}
	}
}
