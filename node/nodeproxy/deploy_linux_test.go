package nodeproxy

import (
	"debug/elf"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	events "k8s.io/api/events/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

const daemonSet = "deploy/daemonset.yaml"

// deployment is what daemonSet holds.
type deployment struct {
	manifest  []runtime.Object
	settings  *v1.ConfigMap
	account   *v1.ServiceAccount
	role      *rbac.ClusterRole
	binding   *rbac.ClusterRoleBinding
	daemonSet *apps.DaemonSet
}

func readDeployment(t *testing.T, options ...string) *deployment {
	t.Helper()
	m := apitest.ReadManifest(t, daemonSet, options...)
	return &deployment{
		manifest: m, settings: apitest.The[*v1.ConfigMap](t, m), account: apitest.The[*v1.ServiceAccount](t, m), role: apitest.The[*rbac.ClusterRole](t, m),
		binding: apitest.The[*rbac.ClusterRoleBinding](t, m), daemonSet: apitest.The[*apps.DaemonSet](t, m),
	}
}

func (d *deployment) container() *v1.Container { return &d.daemonSet.Spec.Template.Spec.Containers[0] }

// TestTheManifest: its objects refer to each other, and the container has one
// capability, cannot get more, and writes nowhere.
func TestTheManifest(t *testing.T) {
	t.Parallel()
	d := readDeployment(t)
	template := d.daemonSet.Spec.Template
	pod, namespace := template.Spec, d.daemonSet.Namespace
	no, yes, root := false, true, int64(0)
	for what, diff := range map[string]string{
		"security context": cmp.Diff(d.container().SecurityContext, &v1.SecurityContext{
			RunAsUser: &root, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
			Capabilities:   &v1.Capabilities{Drop: []v1.Capability{"ALL"}, Add: []v1.Capability{"NET_ADMIN"}},
			SeccompProfile: &v1.SeccompProfile{Type: v1.SeccompProfileTypeRuntimeDefault},
		}),
		"selector":       cmp.Diff(d.daemonSet.Spec.Selector.MatchLabels, template.Labels),
		"account":        cmp.Diff([]string{pod.ServiceAccountName, d.account.Namespace}, []string{d.account.Name, namespace}),
		"settings":       cmp.Diff([]string{d.container().EnvFrom[0].ConfigMapRef.Name, d.settings.Namespace}, []string{d.settings.Name, namespace}),
		"role":           cmp.Diff(d.binding.RoleRef, rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: d.role.Name}),
		"subject":        cmp.Diff(d.binding.Subjects, []rbac.Subject{{Kind: rbac.ServiceAccountKind, Name: d.account.Name, Namespace: namespace}}),
		"tolerations":    cmp.Diff(pod.Tolerations, []v1.Toleration{{Operator: v1.TolerationOpExists}}),
		"priority class": cmp.Diff(pod.PriorityClassName, "system-node-critical"),
	} {
		if diff != "" {
			t.Errorf("%s (-manifest +want):\n%s", what, diff)
		}
	}
	if !pod.HostNetwork || pod.HostPID || pod.HostIPC || pod.SecurityContext != nil || len(pod.InitContainers) > 0 || len(pod.Containers) != 1 {
		t.Errorf("pod is %+v, want one container that shares nothing with the node but the network", pod)
	}
	if mounts := d.container().VolumeMounts; len(pod.Volumes) != 1 || pod.Volumes[0].EmptyDir == nil || len(mounts) != 1 || mounts[0].Name != pod.Volumes[0].Name || mounts[0].MountPath != runFolder {
		t.Errorf("volumes are %+v at %+v, want an empty one for the socket", pod.Volumes, mounts)
	}
}

// The plugin finds the pods of the manifest, with the port of its option, without flags.
func TestThePluginFindsThePods(t *testing.T) {
	t.Parallel()
	d := readDeployment(t, "PAGE")
	source, err := os.ReadFile("cmd/spctl/plugin.go")
	netnstest.Check(t, err)
	label := "app.kubernetes.io/name=" + d.daemonSet.Spec.Template.Labels["app.kubernetes.io/name"]
	for _, want := range []string{`"proxy-namespace", "` + d.daemonSet.Namespace + `"`, `"selector", "l", "` + label + `"`, "debugPort = 10290"} {
		if !strings.Contains(string(source), want) {
			t.Errorf("the plugin's source lacks %q", want)
		}
	}
	if args := d.container().Args; !slices.Contains(args, "--debug-bind-address=$(NODE_IP):10290") || len(args) != len(readDeployment(t).container().Args)+1 {
		t.Errorf("the arguments with the option are %q, want one more than without: the page", args)
	}
}

// The image is built from scratch by the script that builds the binary of the tests, which needs no other file,
// with the oldest Go that compiles the module.
func TestTheImage(t *testing.T) {
	t.Parallel()
	read := func(path string) string {
		text, err := os.ReadFile(path)
		netnstest.Check(t, err)
		return string(text)
	}
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(read("../../go.mod"))[1]
	file := read("deploy/Dockerfile")
	for _, want := range []string{
		"FROM --platform=$BUILDPLATFORM golang:" + version + " AS build\n", "node/nodeproxy/deploy/build.sh /nodeproxy\n",
		"ln -s /nodeproxy /links/usr/bin/spctl && \\\n    ln -s /nodeproxy /links/usr/bin/kube-proxy && ln -s /nodeproxy /links/usr/local/bin/kube-proxy\n",
		"FROM scratch\nCOPY --from=build /links /\nCOPY --from=build /nodeproxy /nodeproxy\nENTRYPOINT [\"/nodeproxy\"]\n",
	} {
		if !strings.Contains(file, want) {
			t.Errorf("the Dockerfile lacks %q", want)
		}
	}
	const script = "node/nodeproxy/deploy/build.sh"
	for pattern := range strings.FieldsSeq(read("../../.dockerignore")) {
		matches, err := path.Match(pattern, script)
		if netnstest.Check(t, err); matches || strings.HasPrefix(script, pattern+"/") {
			t.Errorf(".dockerignore leaves out %s, which the Dockerfile runs, by %q", script, pattern)
		}
	}
	binary, err := build()
	netnstest.Check(t, err)
	parsed, err := elf.Open(binary)
	netnstest.Check(t, err)
	defer parsed.Close()
	if parsed.Section(".interp") != nil || parsed.Section(".dynamic") != nil {
		t.Error("the binary is linked dynamically, want it static")
	}
}

// runFolder is where the container may write.
const runFolder = "/run/serviceplane"

// container is a script. It mounts the root file system and /proc/sys read-only, and the
// service account at its path, drops all capabilities except the manifest's, and executes
// the program.
const container = `account=$1; capabilities=$2; shift 2
mount -t tmpfs tmpfs /var/run
mkdir -p /var/run/secrets/kubernetes.io /var/run/serviceplane
cp -r "$account" /var/run/secrets/kubernetes.io/serviceaccount
mount -o remount,ro /var/run
mount -t tmpfs tmpfs /var/run/serviceplane
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -o remount,bind,ro /
exec setpriv --bounding-set="-all$capabilities" --inh-caps=-all --no-new-privs "$@"`

// startContainer starts the program with the arguments, capabilities and environment of the
// manifest, and a service account with the API server's certificate.
func (d *deployment) startContainer(c *small, certificate []byte) *proxyProcess {
	c.t.Helper()
	binary, err := build()
	netnstest.Check(c.t, err)
	account := c.t.TempDir()
	netnstest.Check(c.t, os.WriteFile(filepath.Join(account, "token"), []byte(token), 0o600))
	netnstest.Check(c.t, os.WriteFile(filepath.Join(account, "ca.crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}), 0o600))
	capabilities := ""
	for _, name := range d.container().SecurityContext.Capabilities.Add {
		capabilities += ",+" + strings.ToLower(string(name))
	}
	p := &proxyProcess{t: c.t, ns: c.node, ended: make(chan struct{})}
	p.cmd = exec.Command("unshare", "--mount", "sh", "-ec", container, "sh", account, capabilities, binary)
	for _, arg := range d.container().Args {
		for _, variable := range d.container().Env {
			value := map[string]string{"spec.nodeName": "node-1", "status.hostIP": "192.0.2.10"}[variable.ValueFrom.FieldRef.FieldPath]
			arg = strings.ReplaceAll(arg, "$("+variable.Name+")", value)
		}
		p.cmd.Args = append(p.cmd.Args, arg)
	}
	p.cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "KUBERNETES_SERVICE_HOST=127.0.0.1"} // SET THIS, 1 of 2
	p.cmd.Env = append(p.cmd.Env, "KUBERNETES_SERVICE_PORT="+d.settings.Data["KUBERNETES_SERVICE_PORT"])
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	netnstest.Check(c.t, c.node.Do(p.cmd.Start))
	p.watch()
	return p
}

// token is the token of the service account.
const token = "token of system:serviceaccount:kube-system:nodeproxy"

// eventAPI is an API server that knows the token of the account, and keeps an event.
type eventAPI struct {
	*apitest.Server

	mu    sync.Mutex
	event events.Event // guarded by mu
}

func (a *eventAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Header.Get("Authorization") != "Bearer "+token:
		http.Error(w, "not the token", http.StatusUnauthorized)
	case r.Method == http.MethodPost:
		a.takeEvent(w, r)
	default:
		a.Server.ServeHTTP(w, r)
	}
}

// takeEvent stores the event that the proxy creates.
func (a *eventAPI) takeEvent(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		_, _, err = scheme.Codecs.UniversalDeserializer().Decode(body, nil, &a.event)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	w.WriteHeader(http.StatusCreated)
	_, _ = w.Write(body) // the client may be gone
}

// expectEvent wants the event that is sent at the start.
func (a *eventAPI) expectEvent(t *testing.T) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if e := &a.event; e.Reason != "Starting" || e.Type != "Normal" || e.Regarding.Kind != "Node" || e.Regarding.Name != "node-1" || e.Namespace != "default" ||
		e.ReportingController == "" || e.ReportingInstance == "" || e.Action == "" || e.EventTime.IsZero() {
		t.Errorf("event %+v, want Starting on the Node node-1, with all that events.k8s.io/v1 requires", e)
	}
}

// The container runs the program with the arguments, rights and account of the manifest, against an API server that
// grants what the ClusterRole does.
func TestTheContainer(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), readDeployment(t, "PAGE")
	api := &eventAPI{Server: apitest.New(t, apitest.Options{})}
	account := apitest.NewAccount(api, d.account.Namespace, d.account.Name, d.manifest...)
	put := func(text string) {
		for _, o := range objects(t, text) {
			api.Put(t, o.Value)
		}
	}
	put(thisNode + "---\n" + webService + "---\n" + webSlices(1) + dns(1))
	listener, err := c.node.Listen(t.Context(), "tcp", "127.0.0.1:"+d.settings.Data["KUBERNETES_SERVICE_PORT"])
	netnstest.Check(t, err)
	server := httptest.NewUnstartedServer(account)
	_ = server.Listener.Close() // it is in another namespace
	server.Listener, server.EnableHTTP2 = listener, true
	server.StartTLS()
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })

	p := d.startContainer(c, server.Certificate().Raw)
	p.waitHealthy()
	for _, probe := range []*v1.Probe{d.container().StartupProbe, d.container().LivenessProbe, d.container().ReadinessProbe} {
		if code, _ := p.get(fmt.Sprintf("%s:%d", probe.HTTPGet.Host, d.container().Ports[0].ContainerPort), probe.HTTPGet.Path); code != http.StatusOK {
			t.Errorf("the probe of %s gets %d, want 200", probe.HTTPGet.Path, code)
		}
	}
	if code, _ := p.get("192.0.2.10:10256", "/healthz"); code != http.StatusOK {
		t.Errorf("load balancers get %d from /healthz, want 200", code)
	}
	// The API server's pod proxy connects to the address of the pod, which is the node's.
	if code, page := p.get("192.0.2.10:10290", "/service?namespace=default&name=web"); code != http.StatusOK || !strings.Contains(page, "10.96.0.10") {
		t.Errorf("the pod proxy gets %d from the debug page, %s, want the Service", code, page)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	netnstest.Check(t, err)
	for _, want := range []string{"CapPrm:\t0000000000001000\n", "CapBnd:\t0000000000001000\n", "NoNewPrivs:\t1\n"} { // 1 << CAP_NET_ADMIN
		if !strings.Contains(string(status), want) {
			t.Errorf("status is\n%swant %q", status, want)
		}
	}
	socket := fmt.Sprintf("/proc/%d/root%s/debug.sock", p.cmd.Process.Pid, runFolder)
	waitSocket(t, socket)
	if got := spctlRuns(t, socket, "services", "web"); !strings.Contains(got, "10.96.0.10") {
		t.Errorf("spctl in the container prints\n%swant the Service", got)
	}
	c.expectNow("pod-1")
	flow, err := netns.Open(t.Context(), c.client, "udp", netip.MustParseAddrPort("10.96.0.53:53"), netns.AskOptions{})
	netnstest.Check(t, err)
	defer flow.Close()
	expectServer := func(server string) {
		t.Helper()
		poll.Nil(t, "the UDP flow reaches "+server, func() error {
			answer, err := flow.Ask(t.Context())
			if err == nil && answer.Server != server {
				err = fmt.Errorf("%s answers", answer.Server)
			}
			return err
		})
	}
	expectServer("pod-1")
	put(webSlices(2) + dns(2))
	expectServer("pod-2") // although pod-1 still answers: its conntrack entry is deleted
	c.expectSoon("pod-2")
	account.ExpectExact(t)
	api.expectEvent(t)
	if err := p.signal(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v, want exit code 0", err)
	}
	c.expectNow("pod-2")
	for line := range strings.Lines(p.stderr()) {
		if !strings.Contains(line, "\tINFO\t") {
			t.Errorf("the log has %q, want no warning", line)
		}
	}
}

// dns is a Service over UDP with one endpoint.
func dns(pod int) string {
	return `---
apiVersion: v1
kind: Service
metadata: {name: dns}
spec: {clusterIP: 10.96.0.53, ports: [{port: 53, targetPort: 8080, protocol: UDP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dns, labels: {kubernetes.io/service-name: dns}}
addressType: IPv4
ports: [{port: 8080, protocol: UDP}]
endpoints: [{addresses: [` + podAddr(pod, 4) + `], nodeName: node-1}]
`
}
