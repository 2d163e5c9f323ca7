package main

import (
	"debug/elf"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"

	"github.com/serviceplane/serviceplane/healthcheck"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// TestTheManifestAsksForTheLeast: the container has one capability, can get no more,
// and writes nowhere.
func TestTheManifestAsksForTheLeast(t *testing.T) {
	t.Parallel()
	d := readDeployment(t)
	pod := d.daemonSet.Spec.Template.Spec
	no, yes, root := false, true, int64(0)
	want := &v1.SecurityContext{
		RunAsUser: &root, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
		Capabilities:   &v1.Capabilities{Drop: []v1.Capability{"ALL"}, Add: []v1.Capability{"NET_ADMIN"}},
		SeccompProfile: &v1.SeccompProfile{Type: v1.SeccompProfileTypeRuntimeDefault},
	}
	if diff := cmp.Diff(want, d.container().SecurityContext); diff != "" {
		t.Errorf("security context (-want +got):\n%s", diff)
	}
	if !pod.HostNetwork || pod.HostPID || pod.HostIPC || pod.SecurityContext != nil || len(pod.Volumes)+len(pod.InitContainers) > 0 || len(pod.Containers) != 1 {
		t.Errorf("pod is %+v, want one container in the node's network, and nothing else of the node", pod)
	}
}

// TestThePartsOfTheManifestFitTogether, by names and labels.
func TestThePartsOfTheManifestFitTogether(t *testing.T) {
	t.Parallel()
	d := readDeployment(t)
	pod := d.daemonSet.Spec.Template
	for what, differs := range map[string]string{
		"the DaemonSet's selector": cmp.Diff(pod.Labels, d.daemonSet.Spec.Selector.MatchLabels),
		"the pod's account":        cmp.Diff(pod.Spec.ServiceAccountName, d.account.Name),
		"the binding's role":       cmp.Diff(rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: d.role.Name}, d.binding.RoleRef),
		"the binding's subject": cmp.Diff(
			[]rbac.Subject{{Kind: rbac.ServiceAccountKind, Name: d.account.Name, Namespace: d.daemonSet.Namespace}}, d.binding.Subjects),
		"the account's namespace":  cmp.Diff(d.daemonSet.Namespace, d.account.Namespace),
		"the settings' namespace":  cmp.Diff(d.daemonSet.Namespace, d.settings.Namespace),
		"the pod's tolerations":    cmp.Diff([]v1.Toleration{{Operator: v1.TolerationOpExists}}, pod.Spec.Tolerations),
		"the pod's priority class": cmp.Diff("system-node-critical", pod.Spec.PriorityClassName),
	} {
		if differs != "" {
			t.Errorf("%s:\n%s", what, differs)
		}
	}
}

// TestTheImageIsBuiltWithTheModulesGo, which is the oldest that compiles it.
func TestTheImageIsBuiltWithTheModulesGo(t *testing.T) {
	t.Parallel()
	module, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	_, version, _ := strings.Cut(string(module), "\ngo ")
	version = strings.Join(strings.Split(version, ".")[:2], ".")
	want := instruction{"FROM", "--platform=$BUILDPLATFORM golang:" + version + " AS build"}
	if got := instructions(t)[0]; got != want {
		t.Errorf("the Dockerfile begins with %v, want %v", got, want)
	}
}

// TestTheContainer builds the binary of the image, and runs it as the manifest says:
// with its rights, command, environment and account, alone in its root.
func TestTheContainer(t *testing.T) {
	t.Parallel()
	netnstest.New(t) // skips before the work, if we may not even do that
	made := buildImage(t)
	t.Run("the binary is static", func(t *testing.T) { expectStatic(t, made.binary) })
	t.Run("it proxies from nothing", func(t *testing.T) {
		t.Parallel()
		expectLife(t, made)
	})
	for _, c := range readDeployment(t).container().SecurityContext.Capabilities.Add {
		t.Run("it says that it lacks "+string(c), func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			s.fillIn()
			s.box(made).without(c).start(t, s.node).expectRefusal("lacking the capability CAP_" + string(c))
		})
	}
	t.Run("it says that the API server is to be set", func(t *testing.T) {
		t.Parallel()
		s := newStage(t)
		s.box(made).start(t, s.node).expectRefusal("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT must be defined")
	})
	t.Run("the cluster IP of the API server is not enough", func(t *testing.T) {
		t.Parallel()
		s := newStage(t)
		s.container().EnvFrom = nil
		p := s.box(made).start(t, s.node)
		s.expectProbe(p, s.container().StartupProbe, http.StatusServiceUnavailable)
		if s.reachesAPI() || p.health().Healthy {
			t.Error("the cluster IP of the API server answers before anything is programmed")
		}
	})
}

// stage is a node without any proxy, its cluster, and what is to be installed there.
type stage struct {
	*small
	*deployment

	api *guardedAPI
}

func newStage(t *testing.T) *stage {
	t.Helper()
	s := &stage{small: newSmall(t), deployment: readDeployment(t)}
	netnstest.Check(t, s.node.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr(apiHost)))
	s.api = serveGuarded(t, s.small, &s.role)
	s.put(thisNode, webService, webSlices(1), dns, dnsSlice(1))
	return s
}

// fillIn is what the operator does.
func (s *stage) fillIn() { s.settings.Data["KUBERNETES_SERVICE_HOST"] = apiHost }

func (s *stage) box(made *image) *box { return newBox(s.t, s.deployment, made, s.api.ca) }

// put creates or replaces objects at the API server.
func (s *stage) put(texts ...string) {
	s.t.Helper()
	for _, o := range objects(s.t, strings.Join(texts, "---\n")) {
		s.api.Put(s.t, o.Value)
	}
}

// expectProbe waits until the kubelet gets an answer to a probe.
func (s *stage) expectProbe(p *proxyProcess, probe *v1.Probe, want int) {
	s.t.Helper()
	address, path := s.probe(s.t, probe)
	code := 0
	ok := poll.Soon(func() bool {
		select {
		case <-p.ended:
			s.t.Fatalf("the process ended: %v", p.err)
		default:
		}
		code, _ = p.get(address, path)
		return code == want
	})
	if !ok {
		s.t.Fatalf("the probe of %s gets %d, want %d", path, code, want)
	}
}

// expectStatic wants a binary that needs no other file.
func expectStatic(t *testing.T, path string) {
	t.Helper()
	file, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if slices.ContainsFunc(file.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		t.Error("the binary has an interpreter, want none")
	}
	if libraries, err := file.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("the binary needs libraries %q, %v, want none", libraries, err)
	}
}

// expectRefusal wants the process to end with an error that says why, and never to be
// healthy.
func (p *proxyProcess) expectRefusal(why string) {
	p.t.Helper()
	code, ended := 0, false
	poll.Soon(func() bool {
		select {
		case <-p.ended:
			ended = true
		default:
			code, _ = p.get("127.0.0.1:10256", healthcheck.LivezPath)
		}
		return ended || code == http.StatusOK
	})
	if !ended {
		p.t.Fatalf("the process goes on, /livez answers %d; want it to end", code)
	}
	if p.err == nil || !strings.Contains(p.stderr(), why) {
		p.t.Errorf("the process ended with %v, want an error with %q", p.err, why)
	}
}

// dns is a Service over UDP, and that of the API server.
const (
	dnsVIP = "10.96.0.53:53"
	dns    = `apiVersion: v1
kind: Service
metadata: {name: dns}
spec: {clusterIP: 10.96.0.53, ports: [{port: 53, targetPort: 8080, protocol: UDP}]}
---
apiVersion: v1
kind: Service
metadata: {name: kubernetes}
spec: {clusterIP: ` + clusterIP + `, ports: [{port: 443, targetPort: ` + apiPort + `}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kubernetes, labels: {kubernetes.io/service-name: kubernetes}}
addressType: IPv4
ports: [{port: ` + apiPort + `}]
endpoints: [{addresses: [` + apiHost + `]}]
`
)

// dnsSlice says that a pod is the only endpoint of the Service over UDP.
func dnsSlice(pod int) string {
	return `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dns, labels: {kubernetes.io/service-name: dns}}
addressType: IPv4
ports: [{port: 8080, protocol: UDP}]
endpoints: [{addresses: [` + podAddr(pod, 4) + `], nodeName: node-1}]
`
}

// expectLife goes through what happens to the container on a node that has no proxy
// yet, up to its end.
func expectLife(t *testing.T, made *image) {
	t.Helper()
	s := newStage(t)
	s.fillIn()
	if s.reachesAPI() {
		t.Fatal("the cluster IP of the API server answers without a proxy")
	}
	b := s.box(made)
	before := b.contents(t)
	p := b.start(t, s.node)
	s.expectProbe(p, s.container().StartupProbe, http.StatusOK)
	b.expectConfined(t, p)
	s.expectNow("pod-1")
	if !s.reachesAPI() {
		t.Error("the cluster IP of the API server does not answer")
	}
	s.expectUDPFollows(func() { s.put(webSlices(2), dnsSlice(2)) })
	s.expectSoon("pod-2")
	s.expectHealthy(p)
	s.api.expectEvent(t, "node-1")
	s.api.expectLeast(t)

	grace := time.Duration(*s.daemonSet.Spec.Template.Spec.TerminationGracePeriodSeconds) * time.Second
	if took, err := p.signal(syscall.SIGTERM); err != nil || took > grace/2 {
		t.Errorf("after SIGTERM: %v after %v, want exit code 0 well within %v", err, took, grace)
	}
	s.expectNow("pod-2")
	if diff := cmp.Diff(before, b.contents(t)); diff != "" {
		t.Errorf("the root has changed (-before +after):\n%s", diff)
	}
	for line := range strings.Lines(p.stderr()) {
		if !strings.Contains(line, "\tINFO\t") {
			t.Errorf("the log has %q, want nothing to worry about", line)
		}
	}
}

// reachesAPI dials the API server where pods expect it.
func (c *small) reachesAPI() bool {
	c.t.Helper()
	_, err := netns.Open(c.t.Context(), c.node, "tcp", netip.MustParseAddrPort(clusterIP+":443"), netns.AskOptions{Timeout: 500 * time.Millisecond})
	return err == nil
}

// expectUDPFollows wants a client that keeps its socket to be led from pod-1 to pod-2
// by a change, although pod-1 still answers.
func (c *small) expectUDPFollows(change func()) {
	c.t.Helper()
	flow, err := netns.Open(c.t.Context(), c.client, "udp", netip.MustParseAddrPort(dnsVIP), netns.AskOptions{})
	netnstest.Check(c.t, err)
	defer flow.Close()
	if answer, err := flow.Ask(c.t.Context()); err != nil || answer.Server != "pod-1" {
		c.t.Fatalf("over UDP %q answers, %v, want pod-1", answer.Server, err)
	}
	change()
	var answer netns.Answer
	if !poll.Soon(func() bool { answer, err = flow.Ask(c.t.Context()); return answer.Server == "pod-2" }) {
		c.t.Errorf("over UDP %q answers, %v, want pod-2 soon", answer.Server, err)
	}
}

// expectHealthy wants the answers that the kubelet and load balancers look for.
func (s *stage) expectHealthy(p *proxyProcess) {
	s.t.Helper()
	s.expectProbe(p, s.container().LivenessProbe, http.StatusOK)
	s.expectProbe(p, s.container().ReadinessProbe, http.StatusOK)
	if code, body := p.get("192.0.2.10:10256", healthcheck.HealthzPath); code != http.StatusOK {
		s.t.Errorf("load balancers get %d, %s, want 200", code, body)
	}
	if report := p.health(); len(report.Reasons) > 0 {
		s.t.Errorf("the proxy complains of %q, want nothing", report.Reasons)
	}
}
