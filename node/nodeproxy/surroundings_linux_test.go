package nodeproxy

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/healthcheck"
)

// TestHealthFollowsSyncs: /healthz returns 503 while syncs fail for longer than the
// threshold. Syncs fail because another process owns the table: the kernel refuses writes
// of other processes until it ends.
func TestHealthFollowsSyncs(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--nftables-min-sync-period=0", "--nftables-sync-period=1s")
	p.waitHealthy()
	c.expectNow("pod-1")

	owner := exec.Command("nft", "-i")
	commands, err := owner.StdinPipe()
	netnstest.Check(t, err)
	netnstest.Check(t, c.node.Do(owner.Start))
	ended := sync.OnceFunc(func() {
		_ = owner.Process.Kill()
		_ = owner.Wait()
	})
	t.Cleanup(ended)
	// One transaction, because the proxy restores a deleted table.
	_, err = io.WriteString(commands, "delete table ip kube-proxy; add table ip kube-proxy { flags owner; }\n")
	netnstest.Check(t, err)

	var report healthcheck.Healthz
	if !poll.Soon(func() bool {
		code, _ := p.get("127.0.0.1:10256", healthcheck.HealthzPath)
		report = p.health()
		return code == http.StatusServiceUnavailable
	}) {
		t.Fatalf("/healthz stays 200 while all syncs fail: %+v", report)
	}
	if report.Healthy || report.Status["IPv4"].Healthy || !report.Status["IPv6"].Healthy || !strings.Contains(strings.Join(report.Reasons, "; "), "IPv4: ") {
		t.Errorf("report %+v, want IPv4 unhealthy, with reasons, and IPv6 not", report)
	}
	if code, _ := p.get("127.0.0.1:10256", healthcheck.LivezPath); code != http.StatusServiceUnavailable {
		t.Errorf("/livez = %d, want 503", code)
	}
	ended()
	p.waitHealthy()
	c.expectNow("pod-1")
}

// loadBalanced is a Service of type LoadBalancer with the health check node port 30999.
const loadBalanced = `apiVersion: v1
kind: Service
metadata: {name: lb}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.77
  externalTrafficPolicy: Local
  healthCheckNodePort: 30999
  ports: [{port: 80, nodePort: 30777}]
status: {loadBalancer: {ingress: [{ip: 203.0.113.7}]}}
`

func lbSlice(conditions string) string {
	return fmt.Sprintf(`apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: lb-1, labels: {kubernetes.io/service-name: lb}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: ["10.244.1.2"], nodeName: node-1, conditions: %s}]
`, conditions)
}

// TestHealthCheckNodePortsFollowEndpoints: HC-08 to HC-10, on the node's addresses. The
// port of a deleted Service is closed.
func TestHealthCheckNodePortsFollowEndpoints(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	d.write("lb.yaml", loadBalanced)
	d.write("lb-slice.yaml", lbSlice("{ready: true}"))
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--nodeport-addresses=0.0.0.0/0,::/0")
	p.waitHealthy()
	p.waitCode("192.0.2.10:30999", "/", http.StatusOK)
	d.write("lb-slice.yaml", lbSlice("{ready: false, serving: true, terminating: true}"))
	p.waitCode("192.0.2.10:30999", "/", http.StatusServiceUnavailable)
	d.write("lb-slice.yaml", lbSlice("{ready: true}"))
	p.waitCode("192.0.2.10:30999", "/", http.StatusOK)
	p.waitCode("[2001:db8::10]:30999", "/", http.StatusOK)
	d.remove("lb.yaml")
	p.waitCode("192.0.2.10:30999", "/", 0)
}

// spans collects the spans that a proxy exports.
type spans struct {
	mu       sync.Mutex
	names    []string // guarded by mu
	services []string // guarded by mu
}

func (s *spans) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var request collector.ExportTraceServiceRequest
	if r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &request) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, resource := range request.GetResourceSpans() {
		for _, a := range resource.GetResource().GetAttributes() {
			s.services = append(s.services, a.GetKey()+"="+a.GetValue().GetStringValue())
		}
		for _, scope := range resource.GetScopeSpans() {
			for _, span := range scope.GetSpans() {
				s.names = append(s.names, span.GetName())
			}
		}
	}
}

func (s *spans) has(names ...string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !slices.ContainsFunc(names, func(n string) bool { return !slices.Contains(s.names, n) }) &&
		slices.Contains(s.services, "service.name=nodeproxy") && slices.Contains(s.services, "k8s.node.name=node-1")
}

// Traces are exported by OTLP over HTTP, the last ones when the proxy ends. The proxy works while the collector is
// unreachable.
func TestTracesAreExported(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--trace-otlp-endpoint=http://127.0.0.1:4318")
	p.waitHealthy()
	c.expectNow("pod-1")
	listener, err := c.node.Listen(t.Context(), "tcp", "127.0.0.1:4318")
	netnstest.Check(t, err)
	var got spans
	server := &http.Server{Handler: &got}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		_ = server.Close()
		<-served
	})
	d.write("endpoints.yaml", webSlices(2))
	c.expectSoon("pod-2")
	if err := p.signal(syscall.SIGTERM); err != nil {
		t.Errorf("the proxy ends with %v, want exit code 0", err)
	}
	if want := []string{"sync", "tracker", "resolve", "plan", "apply"}; !got.has(want...) {
		t.Errorf("spans %v of %v, want %v of node-1's nodeproxy", got.names, got.services, want)
	}
}

// The debug page explains packets of the node.
func TestTheDebugPage(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--debug-bind-address=127.0.0.1:10300", "--nodeport-addresses=0.0.0.0/0")
	p.waitHealthy()
	if code, body := p.get("127.0.0.1:10300", "/"); code != http.StatusOK || !strings.Contains(body, "<html") {
		t.Errorf("the page: code %d, %q, want 200 and HTML", code, body)
	}
	code, body := p.get("127.0.0.1:10300", "/explain?protocol=TCP&source=192.0.2.1&destination="+nodePort+"&origin=outside")
	var explained struct{ Verdict string }
	if err := json.Unmarshal([]byte(body), &explained); err != nil || code != http.StatusOK || explained.Verdict != "forward" {
		t.Errorf("explain: code %d, %s, %v, want the verdict forward", code, body, err)
	}
}
