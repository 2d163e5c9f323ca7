package nodeproxy

import (
	"encoding/pem"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// distribution is how a distribution starts kube-proxy. Its command line is in
// docs/MIGRATING.md.
type distribution struct {
	// files are of the pod or the node: the path, and the file of testdata.
	files map[string]string
	mode  mode
	// warnings are the settings without effect.
	warnings []string
	// inCluster means that the service account is the only configuration of the client.
	inCluster bool
	log       string // file of the output; "" means stderr
}

// distributions returns them by their titles in docs/MIGRATING.md. Sources of the command
// lines: kubeadm: kubernetes/kubernetes, cmd/kubeadm/app/phases/addons/proxy/manifests.go;
// k3s and RKE2: k3s-io/k3s, pkg/daemons/agent/agent_linux.go, and what both log as
// "Running kube-proxy"; MicroShift: openshift/microshift, assets/optional/kube-proxy;
// EKS: the DaemonSet of a cluster with kube-proxy v1.34.3-eksbuild.5; GKE:
// kubernetes/kubernetes, cluster/gce/manifests/kube-proxy.manifest, and pods of
// gke.gcr.io/kube-proxy-amd64 v1.19.10-gke.1600; AKS: the DaemonSets of clusters with
// v1.30.
func distributions() map[string]distribution {
	const kubeconfig = "kubeconfig"
	return map[string]distribution{
		"kubeadm": {mode: modeNFTables, files: map[string]string{
			"/var/lib/kube-proxy/config.conf": "kubeadm/config.conf", "/var/lib/kube-proxy/kubeconfig.conf": kubeconfig,
		}},
		"k3s":  {mode: modeIPTables, files: map[string]string{"/var/lib/rancher/k3s/agent/kubeproxy.kubeconfig": kubeconfig}},
		"RKE2": {mode: modeIPTables, files: map[string]string{"/var/lib/rancher/rke2/agent/kubeproxy.kubeconfig": kubeconfig}},
		"MicroShift": {mode: modeIPTables, files: map[string]string{
			"/var/lib/kube-proxy/config.conf": "microshift/config.conf", "/var/lib/kubeconfig": kubeconfig,
		}},
		"EKS": {mode: modeIPTables, files: map[string]string{
			"/var/lib/kube-proxy-config/config": "eks/config", "/var/lib/kube-proxy/kubeconfig": kubeconfig,
		}},
		"GKE": {
			mode: modeNFTables, files: map[string]string{"/var/lib/kube-proxy/kubeconfig": kubeconfig}, log: "/var/log/kube-proxy.log",
			warnings: []string{"feature gate DynamicKubeletConfig=false", "feature gate RotateKubeletServerCertificate=true"},
		},
		"AKS": {mode: modeNFTables, inCluster: true},
	}
}

// commandLine returns the first block below a title of docs/MIGRATING.md.
func commandLine(t *testing.T, title string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/MIGRATING.md")
	netnstest.Check(t, err)
	block := regexp.MustCompile("(?m)^#### " + title + "\n\n```text\n(.*)\n```$").FindStringSubmatch(string(text))
	if block == nil || !strings.Contains(block[1], "kube-proxy --") {
		t.Fatalf("docs/MIGRATING.md has no command line of kube-proxy below %q", title)
	}
	return strings.NewReplacer("$(NODE_NAME)", "node-1", "NODE", "node-1", "API_SERVER", "127.0.0.1:6443").Replace(block[1])
}

// machine is a script. It makes the program kube-proxy in PATH, /usr/bin and
// /usr/local/bin, as in the image, puts files where the distribution has them, gives the
// node its host name, and keeps the settings that are not per network namespace.
const machine = `files=$1; program=$2; line=$3
hostname node-1
for dir in /run /var/lib /var/log /usr/local/bin; do mount -t tmpfs tmpfs $dir; done
mkdir /run/bin && mount --bind /usr/bin /run/bin && mount -t tmpfs tmpfs /usr/bin && /run/bin/ln -s /run/bin/* /usr/bin/
ln -s "$program" /usr/bin/kube-proxy && ln -s "$program" /usr/local/bin/kube-proxy
for setting in /proc/sys/net/netfilter/nf_conntrack_max /sys/module/nf_conntrack/parameters/hashsize; do
  [ ! -e $setting ] || { cat $setting >/run/setting; cp /run/setting /run/$(basename $setting); mount --bind /run/$(basename $setting) $setting; }
done
cp -rP "$files"/. /
eval "exec $line"`

// place puts a file where a mounted ConfigMap has it: a link to a link to a directory.
func place(tb testing.TB, root, path, text string) {
	tb.Helper()
	dir, name := filepath.Split(filepath.Join(root, path))
	netnstest.Check(tb, os.MkdirAll(filepath.Join(dir, "..2026_11_22"), 0o755)) //nolint:gosec // as in a pod
	netnstest.Check(tb, os.WriteFile(filepath.Join(dir, "..2026_11_22", name), []byte(text), 0o600))
	if _, err := os.Lstat(filepath.Join(dir, "..data")); os.IsNotExist(err) {
		netnstest.Check(tb, os.Symlink("..2026_11_22", filepath.Join(dir, "..data")))
	}
	netnstest.Check(tb, os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)))
}

// startLine starts a command line on a machine with the files of a distribution, and with
// the API server's certificate.
func (d *distribution) startLine(c *small, line string, certificate []byte) *proxyProcess {
	c.t.Helper()
	binary, err := build()
	netnstest.Check(c.t, err)
	root := c.t.TempDir()
	for path, file := range d.files {
		text, err := os.ReadFile(filepath.Join("testdata", file))
		netnstest.Check(c.t, err)
		place(c.t, root, path, string(text))
	}
	const account = "/run/secrets/kubernetes.io/serviceaccount"
	place(c.t, root, account+"/token", token)
	place(c.t, root, account+"/ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})))
	output := filepath.Join(root, d.log)
	if d.log != "" { // the file is outside of the machine's own directories
		output = filepath.Join(c.t.TempDir(), "log")
		line = strings.ReplaceAll(line, d.log, output)
	}
	p := &proxyProcess{t: c.t, ns: c.node, ended: make(chan struct{})}
	p.cmd = exec.Command("unshare", "--mount", "--uts", "sh", "-ec", machine, "sh", root, binary, line)
	p.cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	if d.inCluster {
		p.cmd.Env = append(p.cmd.Env, "KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=6443")
	}
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	netnstest.Check(c.t, c.node.Do(p.cmd.Start))
	p.watch()
	if d.log != "" {
		p.log = output
	}
	return p
}

// TestCommandLinesOfDistributions starts nodeproxy with the command lines and files that
// distributions give kube-proxy, unchanged, and then with --cleanup.
func TestCommandLinesOfDistributions(t *testing.T) {
	t.Parallel()
	for title, d := range distributions() {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			c, line := newSmall(t), commandLine(t, title)
			certificate := c.secureAPI(thisNode + "---\n" + webService + "---\n" + webSlices(1))
			p := d.startLine(c, line, certificate)
			p.waitHealthy()
			c.expectNow("pod-1")
			if _, got := p.get("127.0.0.1:10249", "/proxyMode"); got != string(d.mode) {
				t.Errorf("the mode is %q, want %q", got, d.mode)
			}
			_, metrics := p.get("127.0.0.1:10249", "/metrics")
			if !strings.Contains(metrics, `rest_client_requests_total{code="200",host="127.0.0.1:6443",method="GET"} `) {
				t.Error("/metrics lack rest_client_requests_total")
			}
			if got := p.ignoredSettings(); !slices.Equal(got, d.warnings) {
				t.Errorf("the settings without effect are %q, want %q", got, d.warnings)
			}
			p.kill()
			c.expectNow("pod-1")
			clean := d.startLine(c, withFlag(line, "--cleanup"), certificate)
			if clean.wait(); clean.err != nil {
				t.Errorf("--cleanup: %v, want exit code 0", clean.err)
			}
			if rules := c.nft("list", "ruleset"); strings.Contains(rules, "KUBE") || strings.Contains(rules, "kube-proxy") {
				t.Errorf("after --cleanup, the rules are\n%swant none of ours", rules)
			}
		})
	}
}

// The document has every distribution, and the test has each of them too.
func TestTheDocumentHasEveryDistribution(t *testing.T) {
	text, err := os.ReadFile("../../docs/MIGRATING.md")
	netnstest.Check(t, err)
	var titles, tested []string
	for _, title := range regexp.MustCompile(`(?m)^#### (.*)$`).FindAllStringSubmatch(string(text), -1) {
		titles = append(titles, title[1])
	}
	for title := range distributions() {
		tested = append(tested, title)
	}
	slices.Sort(titles)
	slices.Sort(tested)
	if diff := cmp.Diff(tested, titles); diff != "" {
		t.Errorf("distributions (-test +document):\n%s", diff)
	}
}

// withFlag adds a flag to the end of kube-proxy's command line.
func withFlag(line, flag string) string {
	if begin, redirection, ok := strings.Cut(line, " 1>>"); ok {
		return begin + " " + flag + " 1>>" + redirection
	}
	return line + " " + flag
}

// secureAPI runs an API server on the node at 127.0.0.1:6443 with TLS, and returns its
// certificate.
func (c *small) secureAPI(manifests string) (certificate []byte) {
	c.t.Helper()
	api := apitest.New(c.t, apitest.Options{})
	for _, o := range objects(c.t, manifests) {
		api.Put(c.t, o.Value)
	}
	listener, err := c.node.Listen(c.t.Context(), "tcp", "127.0.0.1:6443")
	netnstest.Check(c.t, err)
	server := httptest.NewUnstartedServer(api)
	_ = server.Listener.Close() // it is in another namespace
	server.Listener, server.EnableHTTP2 = listener, true
	server.StartTLS()
	c.t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	return server.Certificate().Raw
}

// ignoredSettings returns the settings without effect, in the order of the log.
func (p *proxyProcess) ignoredSettings() (all []string) {
	p.t.Helper()
	for _, m := range regexp.MustCompile(`setting has no effect: remove it, or see why\t\{"setting": "([^"]*)"`).FindAllStringSubmatch(p.stderr(), -1) {
		all = append(all, m[1])
	}
	return all
}
