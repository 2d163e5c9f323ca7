package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// debugHandler returns the handler of a proxy on a node, with a Service at a VIP.
func debugHandler(t *testing.T, node, vip string) http.Handler {
	t.Helper()
	config := proxier.Config{
		Families: []v1.IPFamily{v1.IPv4Protocol},
		Node:     changetracker.Node{Name: node, Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.10")}},
	}
	p, err := proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &proxiertest.RecordingEngine{}})
	if err != nil {
		t.Fatal(err)
	}
	p.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs(vip), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	p.OnVersion(changetracker.InputServices, "3")
	p.OnVersion(changetracker.InputEndpointSlices, map[string]string{"node-1": "10", "node-2": "9"}[node])
	proxiertest.Run(t, p)
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return debughttp.Handler(p, debughttp.Version("v1"))
}

// startCluster starts an API server with the pods of three proxies, which forwards requests to
// them. It returns the path of its kubeconfig. The pods are on node-1, on node-2, with another
// VIP if it has one, and on node-3, where the pod is pending.
func startCluster(t *testing.T, vip2 string) (kubeconfig string) {
	t.Helper()
	var pods v1.PodList
	mux := http.NewServeMux()
	add := func(node string, phase v1.PodPhase) {
		pods.Items = append(pods.Items, v1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "nodeproxy-" + node}, Spec: v1.PodSpec{NodeName: node}, Status: v1.PodStatus{Phase: phase},
		})
	}
	for node, vip := range map[string]string{"node-1": "10.96.0.10", "node-2": vip2} {
		pod := httptest.NewServer(debugHandler(t, node, vip))
		t.Cleanup(pod.Close)
		address, err := url.Parse(pod.URL)
		if err != nil {
			t.Fatal(err)
		}
		prefix := "/api/v1/namespaces/kube-system/pods/nodeproxy-" + node + ":10290/proxy"
		// Like the API server's, it passes the client's Host on.
		forward := httputil.NewSingleHostReverseProxy(address)
		mux.Handle(prefix+"/", http.StripPrefix(prefix, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Host != "localhost" { // the name of a real API server, which debughttp refuses
				r.Host = "api.example"
			}
			forward.ServeHTTP(w, r)
		})))
	}
	add("node-1", v1.PodRunning)
	add("node-2", v1.PodRunning)
	add("node-3", v1.PodPending)
	mux.HandleFunc("GET /api/v1/namespaces/kube-system/pods", func(w http.ResponseWriter, r *http.Request) {
		answer := pods
		if r.URL.Query().Get("labelSelector") != "app.kubernetes.io/name=nodeproxy" {
			answer.Items = nil
		}
		_ = json.NewEncoder(w).Encode(answer)
	})
	mux.HandleFunc("GET /api/v1/nodes", func(w http.ResponseWriter, _ *http.Request) {
		var nodes v1.NodeList
		for _, name := range []string{"node-1", "node-2", "node-4", "node-5"} { // node-4 has no pod, node-5 is shut down
			node := v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}}}
			if name == "node-5" {
				node.Spec.Taints = []v1.Taint{{Key: v1.TaintNodeOutOfService, Effect: v1.TaintEffectNoExecute}}
			}
			nodes.Items = append(nodes.Items, node)
		}
		_ = json.NewEncoder(w).Encode(nodes)
	})
	meta := func(name, version string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "shop", Name: name, ResourceVersion: version}
	}
	mux.HandleFunc("GET /api/v1/namespaces/shop/services/web", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(v1.Service{ObjectMeta: meta("web", "3")})
	})
	mux.HandleFunc("GET /apis/discovery.k8s.io/v1/namespaces/shop/endpointslices", func(w http.ResponseWriter, r *http.Request) {
		var slices discovery.EndpointSliceList
		if r.URL.Query().Get("labelSelector") == discovery.LabelServiceName+"=web" {
			for _, version := range []string{"9", "10", "8"} {
				slices.Items = append(slices.Items, discovery.EndpointSlice{ObjectMeta: meta("web-"+version, version)})
			}
		}
		_ = json.NewEncoder(w).Encode(slices)
	})
	api := httptest.NewServer(mux)
	t.Cleanup(api.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"apiVersion": "v1", "kind": "Config", "current-context": "test", "clusters": [{"name": "test", "cluster": {"server": "` + api.URL +
		`"}}], "contexts": [{"name": "test", "context": {"cluster": "test", "user": ""}}]}`
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

func runPlugin(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	command := commandFor("/usr/local/bin/kubectl-serviceplane")
	command.SetArgs(args)
	command.SetOut(&out)
	err := command.ExecuteContext(t.Context())
	return out.String(), err
}

// The plugin shows the nodes side by side, and those that do not answer.
func TestThePlugin(t *testing.T) {
	t.Parallel()
	kubeconfig := "--kubeconfig=" + startCluster(t, "10.96.0.11")
	for line, want := range map[string]struct {
		status int
		output []string
	}{
		"status":                        {spctl.StatusFailed, []string{"node-1   v1", "node-2   v1", "node-3   ask node-3: pod nodeproxy-node-3 is Pending"}},
		"services --node node-1,node-2": {0, []string{"shop        web    http 80/TCP   IPv4     10.96.0.10   0/0         2/2     1"}},
		"diff --node node-1,node-2":     {spctl.StatusDifferent, []string{"cluster IP   10.96.0.10   node-1\n", "cluster IP   10.96.0.11   node-2\n"}},
		"get shop/web --node node-2":    {0, []string{"10.96.0.11:80/TCP"}},
		"get shop/web":                  {spctl.StatusFailed, nil},
		"trace 10.0.0.1 10.96.0.10:80":  {spctl.StatusFailed, nil}, // no proxy offers it there
		"wait shop/web --node node-1":   {0, []string{"node-1   yes"}},
		"wait shop/none --node node-1":  {spctl.StatusFailed, nil},
		"wait shop/web --node node-1,node-2 --timeout 0s": {
			spctl.StatusDifferent, []string{"node-2   no           IPv4: EndpointSlices are those of version 9, want 10"},
		},
		"wait shop/web --timeout 0s":                             {spctl.StatusFailed, []string{"node-1   yes", "node-2   no", "node-4   ask node-4: no proxy runs there now"}},
		"wait shop/web --timeout 0s --node-selector name=node-1": {0, []string{"node-1   yes"}},
		"wait shop/web --timeout 0s --node-selector a=b=c":       {spctl.StatusFailed, nil},
		"verify --node node-3":                                   {spctl.StatusFailed, []string{"Pending"}},
		"status --selector app=other":                            {spctl.StatusFailed, nil},
		"status --proxy-namespace default":                       {spctl.StatusFailed, nil},
		"--help":                                                 {0, []string{"kubectl serviceplane [flags]", "--selector"}},
	} {
		out, err := runPlugin(t, append(strings.Fields(line), kubeconfig)...)
		if spctl.ExitStatus(err) != want.status {
			t.Errorf("%s: %v, want exit status %d", line, err, want.status)
		}
		for _, text := range want.output {
			if !strings.Contains(out, text) {
				t.Errorf("%s prints\n%swant %q in it", line, out, text)
			}
		}
	}
}

// TestNodesThatAgree: the exit status is 0.
func TestNodesThatAgree(t *testing.T) {
	t.Parallel()
	out, err := runPlugin(t, "diff", "--node", "node-1,node-2", "--kubeconfig", startCluster(t, "10.96.0.10"))
	if err != nil || out != "no differences between 2 proxies or files\n" {
		t.Errorf("diff prints %q, %v, want no differences", out, err)
	}
}

// Under another name, the program is the one for one proxy.
func TestAnotherName(t *testing.T) {
	t.Parallel()
	if got := commandFor("/usr/bin/spctl").Flags().Lookup("kubeconfig"); got != nil {
		t.Errorf("spctl has flag %v, want --address only", got)
	}
}
