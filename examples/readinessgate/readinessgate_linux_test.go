package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/fleet"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

const gate = "serviceplane.io/programmed"

// The addresses of pod-1.
const addr4, addr6 = "10.244.0.1", "fd00:244::1"

// testCluster has the Services web, of two families, and api; both select the pods of app web.
type testCluster struct {
	*fleet.Fleet
	t *testing.T
}

func newCluster(t *testing.T, nodes int) *testCluster {
	t.Helper()
	c := &testCluster{fleet.New(t, nodes), t}
	c.Put(t, service("web", "10.96.0.1", "fd00:96::1"))
	c.official("web", false)
	return c
}

func service(name string, ips ...string) *v1.Service {
	s := proxiertest.Service("shop", name, proxiertest.ClusterIPs(ips...), proxiertest.Port("http", v1.ProtocolTCP, 80))
	s.Spec.Selector = map[string]string{"app": "web"}
	s.Spec.Ports[0].TargetPort = intstr.FromString("main")
	return s
}

func pod() *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "pod-1", UID: "uid-1", Labels: map[string]string{"app": "web"}},
		Spec: v1.PodSpec{
			NodeName: "node-1", ReadinessGates: []v1.PodReadinessGate{{ConditionType: gate}},
			Containers: []v1.Container{{Name: "web", Ports: []v1.ContainerPort{{Name: "main", ContainerPort: 8080, Protocol: v1.ProtocolTCP}}}},
		},
		Status: v1.PodStatus{
			PodIPs:     []v1.PodIP{{IP: addr4}, {IP: addr6}},
			Conditions: []v1.PodCondition{{Type: v1.ContainersReady, Status: v1.ConditionTrue}},
		},
	}
}

// secondPod has an IPv4 address only.
func secondPod() *v1.Pod {
	p := pod()
	p.Name, p.UID, p.Status.PodIPs = "pod-2", "uid-2", []v1.PodIP{{IP: "10.244.0.2"}}
	return p
}

// official stores the EndpointSlices of Kubernetes for a Service.
func (c *testCluster) official(service string, ready bool) {
	c.t.Helper()
	for family, addr := range map[discovery.AddressType]string{discovery.AddressTypeIPv4: addr4, discovery.AddressTypeIPv6: addr6} {
		s := proxiertest.Slice("shop", service, family, proxiertest.SliceName(service+"-"+strings.ToLower(string(family))), proxiertest.SlicePort("http", v1.ProtocolTCP, 8080))
		s.Endpoints = []discovery.Endpoint{{
			Addresses: []string{addr}, TargetRef: &v1.ObjectReference{Kind: "Pod", Name: "pod-1", UID: "uid-1"},
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &ready, Terminating: new(false)},
		}}
		c.Put(c.t, s)
	}
}

// get reads an object or a list.
func (c *testCluster) get(path string, into any) {
	c.t.Helper()
	request, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, c.URL()+path, http.NoBody)
	if err != nil {
		c.t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		c.t.Fatal(err)
	}
	defer answer.Body.Close()
	if err := json.NewDecoder(answer.Body).Decode(into); err != nil {
		c.t.Fatal(err)
	}
}

// condition returns a condition of a pod.
func (c *testCluster) condition(pod string, kind v1.PodConditionType) v1.PodCondition {
	c.t.Helper()
	var p v1.Pod
	c.get("/api/v1/namespaces/shop/pods/"+pod, &p)
	i := slices.IndexFunc(p.Status.Conditions, func(c v1.PodCondition) bool { return c.Type == kind })
	if i < 0 {
		return v1.PodCondition{}
	}
	return p.Status.Conditions[i]
}

func (c *testCluster) opens(pod string) {
	c.t.Helper()
	poll.Until(c.t, "the condition is True", func() bool { return c.condition(pod, gate).Status == v1.ConditionTrue })
}

func (c *testCluster) closed() {
	c.t.Helper()
	if got := c.condition("pod-1", gate); got.Status == v1.ConditionTrue {
		c.t.Errorf("the condition is %v, want it not True", got)
	}
}

// ours returns the versions of our EndpointSlices, sorted.
func (c *testCluster) ours() (versions []string) {
	c.t.Helper()
	var list discovery.EndpointSliceList
	c.get("/apis/discovery.k8s.io/v1/endpointslices", &list)
	for _, s := range list.Items {
		if isOurs(&s) {
			versions = append(versions, s.ResourceVersion)
		}
	}
	slices.Sort(versions)
	return versions
}

func (c *testCluster) waitOurs(n int) {
	c.t.Helper()
	poll.Until(c.t, "our EndpointSlices", func() bool { return len(c.ours()) == n })
}

// waitSends waits until a node sends connections of a Service to pod-1.
func (c *testCluster) waitSends(n *fleet.Node, service string) {
	c.t.Helper()
	poll.Until(c.t, "the node sends to the pod", func() bool { return n.Sends(service, addr4) })
}

// start runs the controller until stop is called.
func (c *testCluster) start(args ...string) (logs *observer.ObservedLogs, stop func()) {
	c.t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	ctx, cancel := context.WithCancel(c.t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := run(ctx, append(args, "--kubeconfig="+c.Config, "--port="+c.Port), zap.New(core)); err != nil {
			c.t.Errorf("run: %v", err)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	c.t.Cleanup(stop)
	return logs, stop
}

// What client-go says is in the log of the program, and not in the log of klog.
func TestWhatClientGoSaysIsInTheLog(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1)
	denies := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	t.Cleanup(denies.Close)
	text, err := os.ReadFile(c.Config)
	if err == nil {
		c.Config = filepath.Join(t.TempDir(), "kubeconfig")
		err = os.WriteFile(c.Config, bytes.ReplaceAll(text, []byte(c.URL()), []byte(denies.URL)), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	logs, _ := c.start()
	poll.Until(t, "a line of client-go", func() bool {
		return slices.ContainsFunc(logs.All(), func(e observer.LoggedEntry) bool { return strings.HasPrefix(e.LoggerName, "client-go") })
	})
}

// The condition is True only after the slow node has programmed the pod, in both families. Our
// EndpointSlices go when those of Kubernetes have the pod as ready; nodes send to it all the time.
func TestTheSlowNodeIsWaitedFor(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	slow := c.Nodes[1]
	c.Follow(t, c.Nodes...)
	slow.Engine.Fail(errors.New("busy"))
	c.Put(t, pod())
	c.start()
	c.waitSends(c.Nodes[0], "web")
	c.waitSends(c.Nodes[2], "web")
	slow.WaitRounds(t, "")
	c.closed()
	slow.Engine.Fail(nil)
	c.opens("pod-1")
	if got := c.condition("pod-1", v1.ContainersReady); got.Status != v1.ConditionTrue {
		t.Errorf("the other condition is %v, want it True as before", got)
	}
	check := func() {
		t.Helper()
		for i, n := range c.Nodes {
			if !n.Sends("web", addr4) || !n.Sends("web", addr6) {
				t.Errorf("node %d does not send to all addresses of the pod", i+1)
			}
		}
	}
	check()
	if n := len(c.ours()); n != 2 {
		t.Errorf("%d EndpointSlices are ours before those of Kubernetes have the pod as ready, want 2", n)
	}
	c.official("web", true)
	c.waitOurs(0)
	c.Follow(t, c.Nodes...)
	check()
}

// A node that is cut off keeps the condition False, and is named. When it is no node any more, the
// pod is ready.
func TestTheCutOffNode(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	c.Follow(t, c.Nodes...)
	c.Nodes[2].Stop()
	c.Put(t, pod())
	logs, _ := c.start("--report-after=2s")
	names := func(text string) bool {
		return strings.Contains(text, "service shop/web: 1 nodes have not") && strings.Contains(text, "node node-3: ")
	}
	poll.Until(t, "the condition names the node", func() bool {
		got := c.condition("pod-1", gate)
		return got.Status == v1.ConditionFalse && got.Reason == "NodesBehind" && names(got.Message) && !got.LastTransitionTime.IsZero()
	})
	if !slices.ContainsFunc(logs.All(), func(e observer.LoggedEntry) bool {
		text, _ := e.ContextMap()["error"].(string)
		return strings.Contains(e.Message, "not every node can reach it") && e.ContextMap()["pod"] == "pod-1" && names(text)
	}) {
		t.Errorf("the log is %v, want the pod and the node", logs.All())
	}
	c.Delete(t, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-3"}})
	c.opens("pod-1")
}

// A node that has the version, but does not take the pod as an endpoint, keeps the condition False, and says it.
func TestANodeThatDoesNotTakeThePod(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1)
	c.Follow(t, c.Nodes...)
	p := pod()
	p.Status.PodIPs = []v1.PodIP{{IP: "169.254.0.9"}} // every proxy sets it aside
	c.Put(t, p)
	c.start("--report-after=1s")
	poll.Until(t, "the condition says what the node lacks", func() bool {
		got := c.condition("pod-1", gate)
		return got.Status == v1.ConditionFalse && strings.Contains(got.Message, "node node-1: IPv4: it does not have endpoint 169.254.0.9:8080 of Service shop/web as ready")
	})
	c.Put(t, pod())
	c.opens("pod-1")
}

// A pod that cannot serve any more is published no more: its containers are not ready, or it ends.
func TestRemoval(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	c.Follow(t, c.Nodes...)
	c.Nodes[1].Engine.Fail(errors.New("busy"))
	c.start()
	unready, ending := pod(), pod()
	unready.Status.Conditions[0].Status = v1.ConditionFalse
	ending.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	for _, p := range []*v1.Pod{unready, ending} {
		c.Put(t, pod())
		c.waitOurs(2)
		c.waitSends(c.Nodes[0], "web")
		c.Nodes[1].WaitRounds(t, "")
		c.Put(t, p)
		c.waitOurs(0)
		c.closed()
	}
	c.Nodes[1].Engine.Fail(nil)
	c.Follow(t, c.Nodes...)
	for i, n := range c.Nodes {
		if n.Sends("web", addr4) || n.Sends("web", addr6) {
			t.Errorf("node %d still sends to the pod", i+1)
		}
	}
	c.closed()
}

// A controller that starts again goes on where the one before was, with the same EndpointSlices,
// and removes those of pods that ended meanwhile.
func TestRestart(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	c.Follow(t, c.Nodes...)
	c.Nodes[1].Engine.Fail(errors.New("busy"))
	second := secondPod()
	c.Put(t, pod())
	_, stop := c.start()
	c.waitOurs(2)
	before := c.ours()
	c.Put(t, second)
	c.waitOurs(3)
	stop()
	c.closed()
	c.Delete(t, second)
	c.Nodes[1].Engine.Fail(nil)
	c.start()
	c.opens("pod-1")
	c.waitOurs(2)
	if after := c.ours(); !slices.Equal(after, before) {
		t.Errorf("after the restart our EndpointSlices have versions %q, want those before, %q", after, before)
	}
}

// A pod of two Services waits for both; two controllers at once do the same as one. A pod without
// a Service does not wait, and one without the gate is left alone.
func TestTwoServices(t *testing.T) {
	t.Parallel()
	for refused, other := range map[string]string{"api": "web", "web": "api"} {
		t.Run(refused, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, 2)
			c.Put(t, service("api", "10.96.0.2"))
			c.official("api", false)
			port := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "shop", Name: refused}, Port: "http", Protocol: v1.ProtocolTCP}
			c.Nodes[1].Engine.Refuse(port, errors.New("no room"))
			ungated := pod()
			ungated.Name, ungated.UID, ungated.Spec.ReadinessGates = "pod-2", "uid-2", nil
			c.Put(t, pod(), ungated)
			c.start()
			c.start()
			c.waitOurs(3)
			for _, n := range c.Nodes {
				c.waitSends(n, other)
			}
			c.waitSends(c.Nodes[0], refused)
			c.Nodes[1].WaitRounds(t, "")
			c.closed()
			c.Nodes[1].Engine.Refuse(port, nil)
			c.opens("pod-1")
			for i, n := range c.Nodes {
				if !n.Sends("web", addr4) || !n.Sends("api", addr4) {
					t.Errorf("node %d does not send the connections of both Services to the pod", i+1)
				}
			}
			c.official("web", true)
			c.waitOurs(1)
			c.official("api", true)
			c.waitOurs(0)
			alone := pod()
			alone.Labels = nil
			c.Put(t, alone) // whose condition is not set
			c.opens("pod-1")
		})
	}
}

// The gate opens once: a pod whose containers become ready again is not published again.
func TestTheGateOpensOnce(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1)
	p := pod()
	c.Put(t, p)
	c.start()
	c.opens("pod-1")
	c.official("web", true)
	c.waitOurs(0)
	c.official("web", false)
	p.Status.Conditions = []v1.PodCondition{{Type: v1.ContainersReady, Status: v1.ConditionFalse}, {Type: gate, Status: v1.ConditionTrue}}
	c.Put(t, p)
	p.Status.Conditions[0].Status = v1.ConditionTrue
	c.Put(t, p, secondPod())
	c.opens("pod-2") // so the controller has seen the first one
	if n := len(c.ours()); n != 1 {
		t.Errorf("%d EndpointSlices are ours, want that of the second pod", n)
	}
}

// What cannot be run is an error at once.
func TestFailures(t *testing.T) {
	t.Parallel()
	for want, arg := range map[string]string{
		"--node-selector=a=b=c":         "--node-selector=a=b=c",
		"unknown flag":                  "--nonsense",
		"want more than 0":              "--report-after=0s",
		"load API server configuration": "--kubeconfig=/not/there",
	} {
		if err := run(t.Context(), []string{arg}, zap.NewNop()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("run %s = %v, want an error with %q", arg, err, want)
		}
	}
}
