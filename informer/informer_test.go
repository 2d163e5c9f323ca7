package informer

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder is a Provider that only notes what it is told.
type recorder struct {
	proxier.Provider // nil: what is not overridden must not be called

	mu    sync.Mutex // guards all below
	calls []string
	nodes []changetracker.Node
	cidrs [][]netip.Prefix
}

func (r *recorder) note(call string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, call)
}

func (r *recorder) OnServiceAdd(s *v1.Service)                    { r.note("add " + s.Name) }
func (r *recorder) OnServiceUpdate(_, s *v1.Service)              { r.note("update " + s.Name) }
func (r *recorder) OnServiceDelete(s *v1.Service)                 { r.note("delete " + s.Name) }
func (r *recorder) OnServiceSynced()                              { r.note("services synced") }
func (r *recorder) OnEndpointSlicesSynced()                       { r.note("slices synced") }
func (r *recorder) OnEndpointSliceAdd(s *discovery.EndpointSlice) { r.note("add slice " + s.Name) }
func (r *recorder) OnEndpointSliceUpdate(_, s *discovery.EndpointSlice) {
	r.note("update slice " + s.Name)
}

func (r *recorder) OnEndpointSliceDelete(s *discovery.EndpointSlice) {
	r.note("delete slice " + s.Name)
}

func (r *recorder) OnNodeChange(n changetracker.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, "node "+n.Name)
	r.nodes = append(r.nodes, n)
}

func (r *recorder) OnServiceCIDRsChanged(cidrs []netip.Prefix) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, "cidrs")
	r.cidrs = append(r.cidrs, cidrs)
}

func (r *recorder) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.calls)
}

func (r *recorder) lastNode() changetracker.Node {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.nodes[len(r.nodes)-1]
}

func (r *recorder) lastCIDRs() []netip.Prefix {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.cidrs) == 0 {
		return nil
	}
	return r.cidrs[len(r.cidrs)-1]
}

// eventually polls until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 20s", what)
		}
	}
}

func (r *recorder) eventually(t *testing.T, call string) {
	t.Helper()
	eventually(t, call, func() bool { return slices.Contains(r.all(), call) })
}

func service(name, ip string) *v1.Service {
	return proxiertest.Service("test", name, proxiertest.ClusterIPs(ip), proxiertest.Port("web", v1.ProtocolTCP, 80))
}

func slice(name string, addrs ...string) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{proxiertest.SlicePort("web", v1.ProtocolTCP, 8080)}
	for _, a := range addrs {
		options = append(options, proxiertest.Endpoint(a))
	}
	s := proxiertest.Slice("test", name, discovery.AddressTypeIPv4, options...)
	s.Name = name
	return s
}

func node(name, zone string, addrs ...v1.NodeAddress) *v1.Node {
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelTopologyZone: zone}},
		Status:     v1.NodeStatus{Addresses: addrs},
	}
}

func cidr(name string, cidrs ...string) *networking.ServiceCIDR {
	return &networking.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networking.ServiceCIDRSpec{CIDRs: cidrs}}
}

// headless marks a slice as one of a headless Service.
func headless(s *discovery.EndpointSlice) *discovery.EndpointSlice {
	s = s.DeepCopy()
	s.Labels[v1.IsHeadlessService] = ""
	return s
}

// fixture is a bound factory of a fake API server.
type fixture struct {
	*recorder
	client *fake.Clientset
	stop   func()
	logs   *observer.ObservedLogs
}

func bound(t *testing.T, o Options, objects ...runtime.Object) *fixture {
	t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	o.Logger = zap.New(core)
	f := &fixture{recorder: &recorder{}, client: fake.NewClientset(objects...), logs: logs}
	factory := informers.NewSharedInformerFactory(f.client, o.Resync)
	stop, err := Bind(factory, f, o)
	if err != nil {
		t.Fatalf("Bind: %v", err)
	}
	f.stop = stop
	ctx, cancel := context.WithCancel(t.Context())
	factory.StartWithContext(ctx)
	t.Cleanup(func() {
		stop()
		cancel()
		factory.Shutdown()
	})
	return f
}

// TestEverythingArrivesBeforeSynced (CFG-10, CFG-12): all objects of the first
// lists come before both announcements, each of which comes once.
func TestEverythingArrivesBeforeSynced(t *testing.T) {
	f := bound(t, Options{NodeName: "me"}, service("a", "10.96.0.1"), service("b", "10.96.0.2"), slice("a-1", "10.244.0.1"),
		node("me", "z", v1.NodeAddress{Type: v1.NodeInternalIP, Address: "192.0.2.1"}), node("other", "z"), cidr("c", "10.96.0.0/16"))
	f.eventually(t, "slices synced")
	calls := f.all()
	first := slices.Index(calls, "services synced")
	for _, want := range []string{"add a", "add b", "add slice a-1", "node me", "cidrs"} {
		if i := slices.Index(calls, want); i < 0 || i > first {
			t.Errorf("calls %v: want %q before services synced", calls, want)
		}
	}
	if slices.Contains(calls, "node other") {
		t.Errorf("calls %v: another node was passed on (CFG-05)", calls)
	}
	for _, once := range []string{"services synced", "slices synced"} {
		if n := count(calls, once); n != 1 {
			t.Errorf("%q %d times, want once", once, n)
		}
	}
}

func count(calls []string, call string) (n int) {
	for _, c := range calls {
		if c == call {
			n++
		}
	}
	return n
}

// TestTheFirstSyncWaitsOnlySoLong for a Node that does not exist (NODE-03).
func TestTheFirstSyncWaitsOnlySoLong(t *testing.T) {
	f := bound(t, Options{NodeName: "nobody", Patience: 50 * time.Millisecond}, service("a", "10.96.0.1"))
	f.eventually(t, "slices synced")
	if f.logs.FilterMessageSnippet("waits no longer").FilterField(zap.String("node", "nobody")).Len() != 1 {
		t.Errorf("log %v, want one line about the Node", f.logs.All())
	}
	f.create(t, node("nobody", "z"))
	f.eventually(t, "node nobody")
}

func (f *fixture) create(t *testing.T, object runtime.Object) {
	t.Helper()
	if err := f.client.Tracker().Add(object); err != nil {
		t.Fatal(err)
	}
}

// TestHeadlessSlicesStopHere (CFG-03): a slice that gains the label counts as
// deleted, one that loses it as added.
func TestHeadlessSlicesStopHere(t *testing.T) {
	f := bound(t, Options{}, slice("plain"), headless(slice("headless")))
	f.eventually(t, "slices synced")
	update := func(s *discovery.EndpointSlice) {
		t.Helper()
		if _, err := f.client.DiscoveryV1().EndpointSlices("test").Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	update(headless(slice("plain")))
	f.eventually(t, "delete slice plain")
	update(slice("headless"))
	f.eventually(t, "add slice headless")
	calls := f.all()
	if count(calls, "add slice plain") != 1 || count(calls, "add slice headless") != 1 || count(calls, "delete slice headless") != 0 {
		t.Errorf("calls %v", calls)
	}
}

// TestTombstonesAndWrongTypes (CFG-11): a deletion that was missed comes with the
// last known object; anything else is named in the log and dropped.
func TestTombstonesAndWrongTypes(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	r := &recorder{}
	b := &binding{provider: r, log: zap.New(core)}
	h := handle(b, events[*v1.Service]{add: r.OnServiceAdd, update: r.OnServiceUpdate, remove: r.OnServiceDelete})
	h.OnDelete(cache.DeletedFinalStateUnknown{Key: "test/a", Obj: service("a", "10.96.0.1")})
	h.OnDelete(service("b", "10.96.0.2"))
	if got, want := r.all(), []string{"delete a", "delete b"}; !slices.Equal(got, want) {
		t.Errorf("calls %v, want %v", got, want)
	}
	for _, wrong := range []func(){
		func() { h.OnAdd(node("n", ""), false) },
		func() { h.OnUpdate(service("a", ""), node("n", "")) },
		func() { h.OnUpdate(nil, service("a", "")) },
		func() { h.OnDelete(node("n", "")) },
		func() { h.OnDelete(cache.DeletedFinalStateUnknown{Key: "n", Obj: node("n", "")}) },
		func() { h.OnDelete(cache.DeletedFinalStateUnknown{}) },
	} {
		before := logs.Len()
		wrong()
		if logs.Len() != before+1 {
			t.Errorf("%d log lines about a wrong type, want 1", logs.Len()-before)
		}
	}
	if len(r.all()) != 2 {
		t.Errorf("calls %v, want nothing of a wrong type", r.all())
	}
	if !notHeadless(node("n", "")) || !notHeadless(cache.DeletedFinalStateUnknown{Obj: slice("a")}) ||
		notHeadless(cache.DeletedFinalStateUnknown{Obj: headless(slice("a"))}) {
		t.Error("the filter of slices judges wrongly")
	}
}

// TestStopIsFinal: after it nothing reaches the Provider, also when the factory
// was never started, or stop is called again.
func TestStopIsFinal(t *testing.T) {
	f := bound(t, Options{}, service("a", "10.96.0.1"))
	f.eventually(t, "slices synced")
	f.stop()
	before := len(f.all())
	f.create(t, service("b", "10.96.0.2"))
	time.Sleep(50 * time.Millisecond)
	if got := f.all(); len(got) != before {
		t.Errorf("calls after stop: %v", got[before:])
	}
	f.stop()

	r := &recorder{}
	stop, err := Bind(informers.NewSharedInformerFactory(fake.NewClientset(), 0), r, Options{})
	if err != nil {
		t.Fatal(err)
	}
	stop()
	if len(r.all()) != 0 {
		t.Errorf("calls %v, want none of a factory that was not started", r.all())
	}
	if _, err := Bind(informers.NewSharedInformerFactory(fake.NewClientset(), 0), r, Options{Patience: -1, Resync: -2}); err == nil ||
		!strings.Contains(err.Error(), "Patience") || !strings.Contains(err.Error(), "Resync") {
		t.Errorf("Bind with bad options = %v, want an error that names both", err)
	}
}

// TestAResyncIsCheap (CFG-01): it reaches the Provider as updates, and is no news
// of the Node or the ServiceCIDRs.
func TestAResyncIsCheap(t *testing.T) {
	f := bound(t, Options{NodeName: "me", Resync: time.Second}, service("a", "10.96.0.1"), node("me", "z"), cidr("c", "10.96.0.0/16"))
	eventually(t, "resyncs", func() bool { return count(f.all(), "update a") > 1 })
	if calls := f.all(); count(calls, "node me") != 1 || count(calls, "cidrs") != 1 {
		t.Errorf("calls %v, want Node and ServiceCIDRs once", calls)
	}
}

// TestTheNodeIsFollowed (NODE-04, NODE-06, CFG-30): InternalIPs first, what is no
// address left out; changes of addresses, ranges and zone are passed on; the last
// state outlives the object.
func TestTheNodeIsFollowed(t *testing.T) {
	me := node("me", "zone-a",
		v1.NodeAddress{Type: v1.NodeExternalIP, Address: "203.0.113.7"},
		v1.NodeAddress{Type: v1.NodeHostName, Address: "me"},
		v1.NodeAddress{Type: v1.NodeInternalDNS, Address: "10.1.1.1"},
		v1.NodeAddress{Type: v1.NodeInternalIP, Address: "192.0.2.1"},
		v1.NodeAddress{Type: v1.NodeInternalIP, Address: "me.example"},
		v1.NodeAddress{Type: v1.NodeInternalIP, Address: "2001:db8::1"})
	me.Spec.PodCIDRs = []string{"10.244.1.0/24", "not a range", "fd00:1::/64"}
	f := bound(t, Options{NodeName: "me"}, me)
	f.eventually(t, "slices synced")
	want := changetracker.Node{
		Name: "me", Zone: "zone-a",
		Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("203.0.113.7")},
		PodCIDRs:  []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:1::/64")},
	}
	if got := f.lastNode(); got.Name != want.Name || got.Zone != want.Zone || !slices.Equal(got.Addresses, want.Addresses) || !slices.Equal(got.PodCIDRs, want.PodCIDRs) {
		t.Errorf("node %+v, want %+v", got, want)
	}
	moved := me.DeepCopy()
	moved.Labels[v1.LabelTopologyZone] = "zone-b"
	moved.Status.Addresses = moved.Status.Addresses[3:4]
	moved.Spec.PodCIDRs, moved.Spec.PodCIDR = nil, "10.244.9.0/24"
	if _, err := f.client.CoreV1().Nodes().Update(t.Context(), moved, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node's change", func() bool { return f.lastNode().Zone == "zone-b" })
	if got := f.lastNode(); len(got.Addresses) != 1 || len(got.PodCIDRs) != 1 || got.PodCIDRs[0].String() != "10.244.9.0/24" {
		t.Errorf("node %+v, want one address and the old-style range", got)
	}
	unimportant := moved.DeepCopy()
	unimportant.Annotations = map[string]string{"heartbeat": "1"}
	if _, err := f.client.CoreV1().Nodes().Update(t.Context(), unimportant, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := f.client.CoreV1().Nodes().Delete(t.Context(), "me", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a line about the deletion", func() bool { return f.logs.FilterMessageSnippet("deleted").Len() == 1 })
	if n := count(f.all(), "node me"); n != 2 {
		t.Errorf("%d node changes, want 2: neither heartbeats nor the deletion", n)
	}
}

// TestServiceCIDRsAreAddedUp (CFG-20, CFG-21 with W-15 mended): sorted, without
// duplicates; a range that two objects have outlives one of them.
func TestServiceCIDRsAreAddedUp(t *testing.T) {
	f := bound(t, Options{}, cidr("a", "fd00::/108", "10.96.0.0/16"), cidr("b", "10.96.0.0/16", "10.200.1.0/24", "nonsense"))
	f.eventually(t, "slices synced")
	all := "[10.96.0.0/16 10.200.1.0/24 fd00::/108]"
	eventually(t, all, func() bool { return text(f.lastCIDRs()) == all })
	if f.logs.FilterMessageSnippet("a range that is none").Len() != 1 {
		t.Errorf("log %v, want one line about nonsense", f.logs.All())
	}
	if err := f.client.NetworkingV1().ServiceCIDRs().Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	rest := "[10.96.0.0/16 10.200.1.0/24]"
	eventually(t, rest, func() bool { return text(f.lastCIDRs()) == rest })
	if err := f.client.NetworkingV1().ServiceCIDRs().Delete(t.Context(), "b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no ranges", func() bool { return len(f.lastCIDRs()) == 0 })
}

func text(cidrs []netip.Prefix) string {
	texts := make([]string, len(cidrs))
	for i, c := range cidrs {
		texts[i] = c.String()
	}
	return "[" + strings.Join(texts, " ") + "]"
}

// cluster is a real Proxier of a recording engine, fed by Run from an API server.
type cluster struct {
	*apitest.Server
	engine *proxiertest.RecordingEngine
	logs   *observer.ObservedLogs
	end    func()
}

func startCluster(t *testing.T, server apitest.Options, o Options, objects ...runtime.Object) *cluster {
	t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	o.Logger = zap.New(core)
	c := &cluster{Server: apitest.New(t, server), engine: &proxiertest.RecordingEngine{}, logs: logs}
	c.Put(t, objects...)
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	p, err := proxier.New(proxier.Config{
		Families: []v1.IPFamily{v1.IPv4Protocol}, Runner: runner.Options{MinInterval: runner.Unlimited},
		Tracker: changetracker.Options{ServiceProxyName: o.ServiceProxyName},
	}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: c.engine})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Errorf("Run of the Proxier: %v", err)
		}
	})
	running.Go(func() {
		if err := Run(ctx, client, p, o); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	c.end = func() { cancel(); running.Wait() }
	t.Cleanup(c.end)
	return c
}

// holds is what the engine has: each VIP with its endpoints.
func (c *cluster) holds() string {
	var lines []string
	for _, s := range c.engine.Services() {
		for i := range s.Frontends {
			lines = append(lines, s.Frontends[i].VIP.String()+"="+texts(s.Cluster))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, " ")
}

func texts(addrs []netip.AddrPort) string {
	all := make([]string, len(addrs))
	for i, a := range addrs {
		all[i] = a.Addr().String()
	}
	return strings.Join(all, ",")
}

func (c *cluster) mustHold(t *testing.T, want string) {
	t.Helper()
	deadline := time.Now().Add(40 * time.Second)
	for c.holds() != want {
		if time.Now().After(deadline) {
			t.Fatalf("the engine has %q, want %q\nrequests %v\nlog %v", c.holds(), want, c.Requests(), c.logs.All())
		}
		time.Sleep(time.Millisecond)
	}
}

func labelledService(name, ip, proxy string) *v1.Service {
	s := service(name, ip)
	s.Labels = map[string]string{changetracker.LabelServiceProxyName: proxy}
	return s
}

func bothWays(t *testing.T, test func(t *testing.T, o apitest.Options)) {
	t.Parallel()
	for name, watchList := range map[string]bool{"lists are streamed": true, "lists are lists": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, apitest.Options{WatchList: watchList})
		})
	}
}

// TestRunFollowsAnAPIServer through real HTTP: what exists, what is selected
// (CFG-02, CFG-03), what changes, and relabelling in both directions.
func TestRunFollowsAnAPIServer(t *testing.T) {
	bothWays(t, func(t *testing.T, o apitest.Options) {
		none := proxiertest.Service("test", "none", proxiertest.Headless(), proxiertest.Port("web", v1.ProtocolTCP, 80))
		c := startCluster(t, o, Options{}, service("a", "10.96.0.1"), slice("a", "10.244.0.1"),
			labelledService("theirs", "10.96.0.9", "other"), none, headless(slice("none", "10.244.0.9")), cidr("c", "10.96.0.0/16"))
		c.mustHold(t, "10.96.0.1=10.244.0.1")
		c.Put(t, service("b", "10.96.0.2"), slice("b", "10.244.0.2"), slice("a", "10.244.0.1", "10.244.0.3"))
		c.mustHold(t, "10.96.0.1=10.244.0.1,10.244.0.3 10.96.0.2=10.244.0.2")
		c.Put(t, labelledService("a", "10.96.0.1", "other"))
		c.mustHold(t, "10.96.0.2=10.244.0.2")
		c.Put(t, service("a", "10.96.0.1"), headless(slice("b", "10.244.0.2")))
		c.mustHold(t, "10.96.0.1=10.244.0.1,10.244.0.3 10.96.0.2=")
		c.Delete(t, service("a", ""), slice("a"))
		c.mustHold(t, "10.96.0.2=")
		lists := slices.ContainsFunc(c.Requests(), func(r string) bool { return r == "LIST services" })
		if lists == o.WatchList {
			t.Errorf("requests %v, with lists streamed: %v", c.Requests(), o.WatchList)
		}
		if n := c.logs.Len(); n != 0 {
			t.Errorf("log %v, want nothing", c.logs.All())
		}
	})
}

// TestRunServesAnotherProxyName selects by the label's value.
func TestRunServesAnotherProxyName(t *testing.T) {
	t.Parallel()
	c := startCluster(t, apitest.Options{WatchList: true}, Options{ServiceProxyName: "mine"},
		service("a", "10.96.0.1"), labelledService("b", "10.96.0.2", "mine"), labelledService("c", "10.96.0.3", "theirs"))
	c.mustHold(t, "10.96.0.2=")
}

// TestRunSurvivesTheServersAbsence, and learns what changed and what was deleted
// meanwhile, also when the server has forgotten how it came to that.
func TestRunSurvivesTheServersAbsence(t *testing.T) {
	bothWays(t, func(t *testing.T, o apitest.Options) {
		for _, compact := range []string{"with its history", "without its history"} {
			t.Run(compact, func(t *testing.T) {
				t.Parallel()
				c := startCluster(t, o, Options{}, service("a", "10.96.0.1"), slice("a", "10.244.0.1"), service("b", "10.96.0.2"))
				c.mustHold(t, "10.96.0.1=10.244.0.1 10.96.0.2=")
				c.Stop()
				c.Put(t, slice("a", "10.244.0.5"), service("c", "10.96.0.3"))
				c.Delete(t, service("b", ""))
				if compact == "without its history" {
					c.Compact()
				}
				time.Sleep(100 * time.Millisecond)
				if got := c.holds(); got != "10.96.0.1=10.244.0.1 10.96.0.2=" {
					t.Errorf("the engine has %q while the server is away, want what it had", got)
				}
				c.Start(t)
				c.mustHold(t, "10.96.0.1=10.244.0.5 10.96.0.3=")
			})
		}
	})
}

// TestRunWaitsForAServerThatIsNotThere: nothing is written before it comes.
func TestRunWaitsForAServerThatIsNotThere(t *testing.T) {
	t.Parallel()
	server := apitest.New(t, apitest.Options{})
	server.Stop()
	config, err := clientcmd.BuildConfigFromFlags("", server.Kubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	r := &recorder{}
	core, logs := observer.New(zap.DebugLevel)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, client, r, Options{Patience: time.Millisecond, Logger: zap.New(core)}) }()
	eventually(t, "a line about the absence", func() bool { return logs.FilterMessageSnippet("nothing is written before").Len() == 1 })
	if calls := r.all(); len(calls) != 0 {
		t.Errorf("calls %v without a server, want none", calls)
	}
	server.Put(t, service("a", "10.96.0.1"))
	server.Start(t)
	r.eventually(t, "slices synced")
	if calls := r.all(); !slices.Contains(calls, "add a") {
		t.Errorf("calls %v, want the Service", calls)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v, want nil when ctx ends", err)
	}
}

// TestAnOldAPIServerHasNoServiceCIDRs: it is waited for no longer than Patience,
// and complained about once.
func TestAnOldAPIServerHasNoServiceCIDRs(t *testing.T) {
	t.Parallel()
	c := startCluster(t, apitest.Options{Hidden: []string{"servicecidrs"}}, Options{Patience: 100 * time.Millisecond},
		service("a", "10.96.0.1"), slice("a", "10.244.0.1"))
	c.mustHold(t, "10.96.0.1=10.244.0.1")
	if n := c.logs.FilterField(zap.String("objects", "ServiceCIDRs")).Len(); n != 1 {
		t.Errorf("%d lines about ServiceCIDRs, want 1: %v", n, c.logs.All())
	}
}
