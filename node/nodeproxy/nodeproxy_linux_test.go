package nodeproxy

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/healthcheck"
)

// The log of client-go is in the format of the proxy's own log: the warning about the event Starting, which
// client-go logs with klog, and the warning of the informers' logger.
func TestTheLogOfClientGo(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	listener, err := ns.Listen(t.Context(), "tcp", "127.0.0.1:6443")
	netnstest.Check(t, err)
	api := apitest.New(t, apitest.Options{Listener: listener, Warning: "v0 is deprecated"})
	p := start(t, ns, "--kubeconfig="+api.Kubeconfig(t), "--proxy-mode=userspace", "--state-dir="+t.TempDir())
	p.waitOutput("INFO\tclient-go\tWarning: v0 is deprecated", "INFO\tinformer.client-go\tWarning: v0 is deprecated")
	if klog := regexp.MustCompile(`(?m)^[IWEF]\d{4} .*`).FindString(p.stderr()); klog != "" {
		t.Errorf("the output has klog's line %q", klog)
	}
}

// TestManifests runs a proxy without an API server through changes, a stop and a cleanup.
func TestManifests(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	c.nft("add table ip foreign; add chain ip foreign input { type filter hook input priority 0; }; add rule ip foreign input counter packets 0 bytes 0 accept")
	c.nft("delete", "rule", "ip", "foreign", "input", "handle", "2") // its counter would change
	before := c.state()
	state := filepath.Join(t.TempDir(), "state")
	flags := []string{"--state-dir=" + state, "--conntrack-tcp-be-liberal", "--conntrack-udp-timeout=77s"}

	p := start(t, c.node, append(flags, "--manifests="+d.path, "--cluster-cidr=10.244.0.0/16,fd00:244::/32")...)
	p.waitHealthy()
	p.waitOutput(`"mode": "nftables"`, `"version": "`, "the first sync is done", `"servicePortsIPv4": 1`)
	c.expectNow("pod-1")
	flow := c.open(vip4)

	d.write("endpoints.yaml", webSlices(2))
	c.expectSoon("pod-2")
	c.expectOpen(flow, "pod-1")

	d.write("endpoints.yaml", strings.Replace(webSlices(1), "endpoints:", "endpionts:", 1))
	p.waitOutput("endpoints.yaml:6: endpionts: unknown field")
	c.expectNow("pod-2")
	d.write("service.yaml", webService+"---\napiVersion: v1\nkind: Service\nmetadata: {name: more}\nspec: {clusterIP: 10.96.0.11, ports: [{port: 80}]}\n")
	if !poll.Soon(func() bool {
		return strings.Contains(c.nft("list", "table", "ip", "kube-proxy"), "10.96.0.11")
	}) {
		t.Error("the table lacks the VIP of the new Service")
	}
	c.expectNow("pod-2")

	d.write("endpoints.yaml", webSlices(1))
	c.expectSoon("pod-1")

	if err := p.signal(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v, want exit code 0", err)
	}
	c.expectNow("pod-1") // CLEAN-03
	if got := c.sysctls(); !strings.Contains(got, "be_liberal = 1\n") || !strings.Contains(got, "udp_timeout = 77\n") || !strings.Contains(got, "established = 86400\n") {
		t.Errorf("settings are\n%swant be_liberal, udp_timeout 77 and established 86400", got)
	}

	cleanUp(t, c.node, flags...)
	if diff := cmp.Diff(before, c.state()); diff != "" {
		t.Errorf("after --cleanup (-before +after):\n%s", diff)
	}
	if _, err := os.Stat(state); !os.IsNotExist(err) {
		t.Errorf("state directory: %v, want it gone", err)
	}
}

// TestAPIServer runs a proxy with an API server that stops for a while, with and without
// streamed lists.
func TestAPIServer(t *testing.T) {
	for name, watchList := range map[string]bool{"streamed lists": true, "plain lists": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newSmall(t)
			listen := func() (net.Listener, error) { return c.node.Listen(t.Context(), "tcp", "127.0.0.1:6443") }
			listener, err := listen()
			netnstest.Check(t, err)
			api := apitest.New(t, apitest.Options{WatchList: watchList, Listener: listener, Listen: listen})
			put := func(text string) {
				t.Helper()
				for _, o := range objects(t, text) {
					api.Put(t, o.Value)
				}
			}
			put(thisNode + "---\n" + webService + "---\n" + webSlices(1))

			p := start(t, c.node, "--kubeconfig="+api.Kubeconfig(t), "--detect-local-mode=NodeCIDR", "--state-dir="+t.TempDir())
			p.waitHealthy()
			c.expectNow("pod-1")
			put(webSlices(2))
			p.waitProgrammed(changetracker.Versions{EndpointSlices: strconv.FormatUint(api.Version(), 10)})
			c.expectNow("pod-2")

			api.Stop()
			put(webSlices(1))
			p.waitOutput("API server does not answer", "127.0.0.1:6443: connect: connection refused")
			c.expectNow("pod-2")
			api.Start(t)
			c.expectSoon("pod-1")
			p.waitOutput("API server answers again")

			if err := p.signal(os.Interrupt); err != nil {
				t.Errorf("after SIGINT: %v, want exit code 0", err)
			}
			c.expectNow("pod-1")
		})
	}
}

// TestServiceImports: a client reaches the endpoints of all clusters at a cluster set IP.
func TestServiceImports(t *testing.T) {
	t.Parallel()
	c := newSmall(t)
	listener, err := c.node.Listen(t.Context(), "tcp", "127.0.0.1:6443")
	netnstest.Check(t, err)
	api := apitest.New(t, apitest.Options{Listener: listener})
	for _, o := range objects(t, thisNode+"---\n"+webService+"---\n"+webSlices(1)+importedSlice("east", 1)+importedSlice("west", 2)) {
		api.Put(t, o.Value)
	}
	p := start(t, c.node, "--kubeconfig="+api.Kubeconfig(t), "--service-imports", "--cluster-id=east", "--state-dir="+t.TempDir())
	p.waitHealthy()
	c.expectNow("pod-1")

	imported := apitest.ServiceImport("default", "web")
	imported.Object["spec"] = map[string]any{"type": "ClusterSetIP", "ips": []any{"172.30.0.1"}, "ports": []any{map[string]any{"port": int64(80)}}}
	api.Put(t, imported)
	for _, server := range []string{"pod-1", "pod-2"} {
		poll.Until(t, "an answer of "+server, func() bool {
			return c.ask(netip.MustParseAddrPort("172.30.0.1:80"), netns.AskOptions{Timeout: time.Second}) == server
		})
	}
	api.Delete(t, imported)
	poll.Until(t, "no table with the cluster set IP", func() bool { return !strings.Contains(c.nft("list", "ruleset"), "172.30.0.1") })
	c.expectNow("pod-1")
}

// importedSlice returns the EndpointSlice of a cluster, with one pod as the endpoint.
func importedSlice(cluster string, pod int) string {
	return fmt.Sprintf(`apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: imported-%[1]s, labels: {multicluster.kubernetes.io/service-name: web, multicluster.kubernetes.io/source-cluster: %[1]s}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: ["%[2]s"], nodeName: node-1}]
---
`, cluster, podAddr(pod, 4))
}

// TestARestartKeepsFlows: the rules stay when the proxy is killed, and the next one adopts
// them.
func TestARestartKeepsFlows(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	flags := []string{"--manifests=" + d.path, "--state-dir=" + t.TempDir()}
	p := start(t, c.node, flags...)
	p.waitHealthy()
	flow := c.open(vip6)
	p.kill()
	c.expectNow("pod-1")
	d.write("endpoints.yaml", webSlices(2)) // while no proxy runs
	p = start(t, c.node, flags...)
	p.waitHealthy()
	c.expectNow("pod-2")
	c.expectOpen(flow, "pod-1")
}

// Two instances share a node, each with its own names, mark and ports.
func TestTwoInstancesShareANode(t *testing.T) {
	t.Parallel()
	c, d, other := newSmall(t), newDirectory(t), newDirectory(t)
	other.write("service.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.97.0.1, ports: [{port: 80}]}\n")
	state := "--state-dir=" + t.TempDir()
	p := start(t, c.node, "--manifests="+d.path, state)
	second := []string{"--instance=edge", "--nftables-masquerade-bit=15", "--healthz-bind-address=127.0.0.1:20256", "--metrics-bind-address=", state}
	q := start(t, c.node, append(second, "--manifests="+other.path)...)
	p.waitHealthy()
	q.waitCode("127.0.0.1:20256", healthcheck.HealthzPath, http.StatusOK)
	c.expectNow("pod-1")
	if got := c.nft("list", "table", "ip", "serviceplane-edge"); !strings.Contains(got, "10.97.0.1") {
		t.Errorf("table of the second instance is\n%swant 10.97.0.1 in it", got)
	}
	if err := q.signal(syscall.SIGTERM); err != nil {
		t.Errorf("the second instance ends with %v, want exit code 0", err)
	}
	cleanUp(t, c.node, second...)
	if got := c.nft("list", "tables"); strings.Contains(got, "edge") || !strings.Contains(got, "kube-proxy") {
		t.Errorf("tables are\n%swant those of the first instance only", got)
	}
	c.expectNow("pod-1")
	if got := p.health(); len(got.Reasons) > 0 {
		t.Errorf("the first instance reports %q, want no reasons", got.Reasons)
	}
}

func TestHealthAndMetrics(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir())
	p.waitHealthy()
	report := p.health()
	if !report.Healthy || len(report.Status) != 2 || len(report.Reasons) > 0 {
		t.Errorf("health report %+v, want both families healthy without any reason", report)
	}
	if _, got := p.get("127.0.0.1:10249", "/proxyMode"); got != "nftables" {
		t.Errorf("/proxyMode = %q, want nftables", got)
	}
	_, metrics := p.get("127.0.0.1:10249", "/metrics")
	for _, want := range []string{
		`kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"} `,
		`kubeproxy_proxy_healthz_total{code="200"} `,
		"process_resident_memory_bytes ",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %q", want)
		}
	}
	d.write("endpoints.yaml", webSlices(2))
	c.expectSoon("pod-2")
	if !poll.Soon(func() bool {
		_, metrics = p.get("127.0.0.1:10249", "/metrics")
		counted := func(kind string) bool { // the series exist from the start, with 0
			name := `kubeproxy_sync_` + kind + `_proxy_rules_duration_seconds_count{ip_family="IPv4"} `
			return strings.Contains(metrics, name) && !strings.Contains(metrics, name+"0\n")
		}
		return counted("partial") && counted("full")
	}) {
		t.Error("metrics lack a full or a partial sync")
	}
}

// A server that cannot listen retries, and the proxy works meanwhile.
func TestAServerThatCannotListen(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	busy, err := c.node.Listen(t.Context(), "tcp", "127.0.0.1:10249")
	netnstest.Check(t, err)
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir())
	p.waitHealthy()
	p.waitOutput("server does not answer", "10249")
	c.expectNow("pod-1")
	if err := busy.Close(); err != nil {
		t.Fatal(err)
	}
	p.waitCode("127.0.0.1:10249", healthcheck.HealthzPath, http.StatusOK)
}

// TestSettings: --cleanup restores the kernel settings that the proxy changed.
func TestSettings(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	before, state := c.sysctls(), "--state-dir="+t.TempDir()
	p := start(t, c.node, "--manifests="+d.path, state, "--conntrack-tcp-timeout-close-wait=11s", "--conntrack-udp-timeout-stream=33s")
	p.waitHealthy()
	after := c.sysctls()
	for _, want := range []string{"nf_conntrack_tcp_timeout_close_wait = 11\n", "nf_conntrack_udp_timeout_stream = 33\n"} {
		if !strings.Contains(after, want) {
			t.Errorf("settings are\n%swant %s", after, want)
		}
	}
	p.kill()
	cleanUp(t, c.node, state)
	if diff := cmp.Diff(before, c.sysctls()); diff != "" {
		t.Errorf("settings (-before +after):\n%s", diff)
	}
}

func TestAnInvalidCommandLineEndsWithCode1(t *testing.T) {
	t.Parallel()
	p := start(t, netnstest.New(t), "--proxy-mode=bpf", "--nftables-masquerade-bit=99")
	p.wait()
	p.waitOutput("nodeproxy: bad command line:", "--proxy-mode=bpf: want nftables", "--nftables-masquerade-bit=99: want 0 to 31")
	if got := p.cmd.ProcessState.ExitCode(); got != 1 {
		t.Errorf("exit code %d, want 1", got)
	}
}

func TestAMissingDirectoryEndsWithCode1(t *testing.T) {
	t.Parallel()
	c := newSmall(t)
	before := c.state()
	p := start(t, c.node, "--manifests=/not/there", "--state-dir="+t.TempDir())
	p.wait()
	p.waitOutput("nodeproxy: open directory of manifests:", "/not/there")
	if got := p.cmd.ProcessState.ExitCode(); got != 1 {
		t.Errorf("exit code %d, want 1", got)
	}
	if diff := cmp.Diff(before, c.state()); diff != "" {
		t.Errorf("in the kernel (-before +after):\n%s", diff)
	}
}

func TestOutsideOfAPodASourceIsRequired(t *testing.T) {
	t.Parallel()
	p := start(t, netnstest.New(t))
	p.wait()
	p.waitOutput("load API server configuration:", "use --kubeconfig, --master or --manifests")
}

func TestWithoutPrivilegeTheErrorNamesTheCapability(t *testing.T) {
	netnstest.Unprivileged(t, func(t *testing.T) {
		err := execute(t.Context(), []string{"--manifests=" + t.TempDir()}, nil)
		if err == nil || !strings.Contains(err.Error(), "CAP_NET_ADMIN") || !strings.Contains(err.Error(), "root") {
			t.Errorf("execute = %v, want an error that names CAP_NET_ADMIN and root", err)
		}
	})
}
