package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/fleet"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/node/programmed/cluster"
	"github.com/serviceplane/serviceplane/proxiertest"
)

var yes = true

// testCluster has the Services of the tests.
type testCluster struct {
	*fleet.Fleet
	t *testing.T
}

func newCluster(t *testing.T, nodes int) *testCluster {
	t.Helper()
	c := &testCluster{Fleet: fleet.New(t, nodes), t: t}
	for name, ip := range map[string]string{"web": "10.96.0.1", "api": "10.96.0.2"} {
		c.Put(t, proxiertest.Service("shop", name, proxiertest.ClusterIPs(ip), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	}
	return c
}

// pod returns an endpoint; ready and ending are its conditions.
func pod(name string, ending bool) discovery.Endpoint {
	ready := !ending
	return discovery.Endpoint{
		Addresses: []string{"10.244.0." + name}, TargetRef: &v1.ObjectReference{Kind: "Pod", Name: "pod-" + name},
		Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &yes, Terminating: &ending},
	}
}

// put stores the EndpointSlice of a Service.
func (c *testCluster) put(service string, endpoints ...discovery.Endpoint) {
	c.t.Helper()
	s := proxiertest.Slice("shop", service, discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080))
	s.Endpoints = endpoints
	c.Put(c.t, s)
}

// hook is a run of the program as a pod's hook.
type hook struct {
	ended chan struct{}
	err   error
}

// hook starts the program for a pod. It ends with ctx, as at its deadline.
func (c *testCluster) hook(ctx context.Context, name string, args ...string) *hook {
	return c.hookOf(ctx, "pod-"+name, "10.244.0."+name, args...)
}

// hookOf is hook for any pod.
func (c *testCluster) hookOf(ctx context.Context, name, ip string, args ...string) *hook {
	h := &hook{ended: make(chan struct{})}
	env := map[string]string{"POD_NAME": name, "POD_NAMESPACE": "shop", "POD_IPS": ip}
	go func() {
		defer close(h.ended)
		h.err = run(ctx, slices.Concat([]string{"--kubeconfig=" + c.Config, "--port=" + c.Port, "--deadline=10m"}, args), func(k string) string { return env[k] })
	}()
	return h
}

func (h *hook) running() bool {
	select {
	case <-h.ended:
		return false
	default:
		return true
	}
}

func portNamed(service string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "shop", Name: service}, Port: "http", Protocol: v1.ProtocolTCP}
}

// watched waits until a hook watches: other than nodes, it selects nothing.
func (c *testCluster) watched() {
	c.t.Helper()
	poll.Until(c.t, "the hook watches", func() bool {
		return strings.Contains(strings.Join(c.Requests(), "\n"), "WATCH endpointslices?sendInitialEvents=false&allowWatchBookmarks=true&resourceVersion=")
	})
}

// The hook waits for the EndpointSlice, then for the last node. Then no node sends to the pod.
func TestTheSlowNodeIsWaitedFor(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	slow := c.Nodes[1]
	c.put("web", pod("1", false), pod("2", false))
	c.Follow(t, c.Nodes...)
	h := c.hook(t.Context(), "1")
	c.watched()
	slow.Engine.Fail(errors.New("busy"))
	c.put("web", pod("1", true), pod("2", false))
	c.Follow(t, c.Nodes[0], c.Nodes[2])
	slow.WaitRounds(t, "10.244.0.1")
	if !h.running() {
		t.Errorf("the hook ended with %v before the slow node followed", h.err)
	}
	slow.Engine.Fail(nil)
	<-h.ended
	if h.err != nil {
		t.Errorf("the hook ended with %v, want no error", h.err)
	}
	for i, n := range c.Nodes {
		if n.Sends("web", "10.244.0.1") || !n.Sends("web", "10.244.0.2") {
			t.Errorf("node %d sends to the pod that ends, or not to the other", i+1)
		}
	}
}

// At the deadline the error names the nodes that are behind and why, and only those.
func TestTheDeadline(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	c.put("web", pod("1", false), pod("2", false))
	c.Follow(t, c.Nodes...)
	c.Nodes[2].Engine.Fail(errors.New("out of memory"))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	h := c.hook(ctx, "1")
	c.watched()
	c.put("web", pod("1", true), pod("2", false))
	c.Follow(t, c.Nodes[0], c.Nodes[1])
	for _, n := range c.Nodes[2:] {
		n.WaitRounds(t, "10.244.0.1")
	}
	stop()
	<-h.ended
	behind, ok := errors.AsType[*programmed.BehindError](h.err)
	if !ok || len(behind.Nodes) != 1 || behind.Nodes["node-3"] == nil || status(h.err) != 1 || !strings.Contains(h.err.Error(), "change of shop/web: 1 nodes") ||
		!strings.Contains(h.err.Error(), "node node-3: IPv4: the last sync failed: IPv4: out of memory") {
		t.Errorf("the hook ended with %v (%d), want node-3 and its reason, and status 1", h.err, status(h.err))
	}
}

// The hook lists what the API server has stored: in an older list its pod may not be there yet, and seem to have left.
func TestTheListIsFresh(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1)
	c.put("web", pod("1", true), pod("2", false))
	if h := c.hook(t.Context(), "1"); true {
		<-h.ended
	}
	if requests := c.Requests(); !slices.Contains(requests, "LIST endpointslices?") {
		t.Errorf("requests %q, want a list of EndpointSlices without a version", requests)
	}
}

// The API server has forgotten the versions from which the hook and the nodes watch: they list again.
func TestTheHookListsAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	c.put("web", pod("1", false), pod("2", false))
	c.Follow(t, c.Nodes...)
	h := c.hook(t.Context(), "1")
	c.watched()
	c.Stop()
	c.Compact()
	c.put("web", pod("1", true), pod("2", false))
	c.Start(t)
	<-h.ended
	if h.err != nil {
		t.Errorf("the hook ended with %v, want no error", h.err)
	}
	for i, n := range c.Nodes {
		if n.Sends("web", "10.244.0.1") {
			t.Errorf("node %d sends to the pod", i+1)
		}
	}
}

// A pod that stays in its EndpointSlice: the error says so.
func TestAPodThatStays(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1)
	c.put("web", pod("1", false), pod("2", false))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	h := c.hook(ctx, "1")
	c.watched()
	stop()
	<-h.ended
	if e, ok := errors.AsType[*cluster.NotLeftError](h.err); !ok || !errors.Is(h.err, context.Canceled) || status(h.err) != 1 || !strings.Contains(e.Error(), "still has the pod as ready") {
		t.Errorf("the hook ended with %v, want that the pod still gets connections", h.err)
	}
}

// A service port that fails on a node is an exception of its Service: hooks of others' pods end.
func TestAFailedServicePort(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	c.put("web", pod("1", false), pod("2", false))
	c.put("api", pod("3", false), pod("4", false))
	c.Follow(t, c.Nodes...)
	c.Nodes[1].Engine.Refuse(portNamed("api"), errors.New("no room"))
	c.put("web", pod("1", true), pod("2", false))
	c.put("api", pod("3", true), pod("4", false))
	web := c.hook(t.Context(), "1")
	<-web.ended
	if web.err != nil {
		t.Errorf("the hook of the other Service ended with %v, want no error", web.err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	c.Follow(t, c.Nodes[0])
	api := c.hook(ctx, "3")
	c.Nodes[1].WaitRounds(t, "10.244.0.3")
	stop()
	<-api.ended
	if text := fmt.Sprint(api.err); !strings.Contains(text, `node node-2: IPv4: it still sends to 10.244.0.3:8080: port "http" (TCP) of Service shop/api`) || !strings.Contains(text, "no room") || strings.Contains(text, "node-1") {
		t.Errorf("the hook of the Service that fails ended with %v, want node-2 and its reason", api.err)
	}
}

// Nodes that do not count: by their labels, and because they are long not Ready.
func TestNodesThatDoNotCount(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	dead := c.Nodes[1]
	dead.Engine.Fail(errors.New("dead"))
	c.Put(t, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-2"}, Status: v1.NodeStatus{
		Addresses:  []v1.NodeAddress{{Type: v1.NodeExternalIP, Address: "127.0.7.2"}},
		Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionUnknown, LastTransitionTime: metav1.NewTime(time.Now().Add(-time.Hour))}},
	}})
	c.put("web", pod("1", true), pod("2", false))
	c.Follow(t, c.Nodes[0])
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	h := c.hook(ctx, "1")
	dead.WaitRounds(t, "10.244.0.1")
	stop()
	<-h.ended
	if text := fmt.Sprint(h.err); !strings.Contains(text, "node node-2: ") || strings.Contains(text, "node-1") {
		t.Errorf("the hook ended with %v, want the node that is not ready", h.err)
	}
	for flag, want := range map[string]string{"--ignore-not-ready-for=5m": "", "--node-selector=proxy=ours": "", "--node-selector=proxy=another": "no node counts"} {
		h := c.hook(t.Context(), "1", "--deadline=2s", flag)
		<-h.ended
		if want == "" && h.err != nil || want != "" && (h.err == nil || !strings.Contains(h.err.Error(), want)) {
			t.Errorf("%s: the hook ended with %v, want %q", flag, h.err, want)
		}
	}
}

// An API server that does not let the hook read EndpointSlices may know its role later. Until the deadline, the
// hook asks again, and then says it.
func TestARoleThatComesLater(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1)
	c.put("web", pod("1", true), pod("2", false))
	c.Follow(t, c.Nodes[0])
	c.Change(nil, []string{"endpointslices"})
	h := c.hook(t.Context(), "1", "--deadline=1s")
	<-h.ended
	if h.err == nil || !strings.Contains(h.err.Error(), "watch EndpointSlices of namespace shop: endpointslices.discovery.k8s.io is forbidden") || status(h.err) != statusBehind {
		t.Errorf("the hook ended with %v (%d), want that EndpointSlices are forbidden", h.err, status(h.err))
	}
	asked := len(c.Requests())
	h = c.hook(t.Context(), "1")
	poll.Until(t, "the hook asks", func() bool { return len(c.Requests()) > asked })
	c.Change(nil, nil)
	<-h.ended
	if h.err != nil {
		t.Errorf("the hook ended with %v, want no error", h.err)
	}
}

// What a hook cannot do is an error at once, with another status.
func TestFailures(t *testing.T) {
	t.Parallel()
	all := map[string]string{"POD_NAME": "a", "POD_NAMESPACE": "shop", "POD_IPS": "10.244.0.1"}
	for want, test := range map[string]struct {
		env  map[string]string
		args []string
	}{
		"is not set: take them from the downward API": {env: map[string]string{"POD_NAME": "a"}},
		"--node-selector=a=b=c":                       {env: all, args: []string{"--node-selector=a=b=c"}},
		"unknown flag":                                {env: all, args: []string{"--nonsense"}},
		"load API server configuration":               {env: all, args: []string{"--kubeconfig=/not/there"}},
		"copy: want the name of one file":             {args: []string{"copy"}},
	} {
		err := run(t.Context(), test.args, func(k string) string { return test.env[k] })
		if err == nil || !strings.Contains(err.Error(), want) || status(err) != statusFailed {
			t.Errorf("run = %v (%d), want an error with %q and status 2", err, status(err), want)
		}
	}
}
