package informer

import (
	"context"
	"flag"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "16"); err != nil { // they wait for servers, not for processors
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// recorder is a Provider that only records its calls.
type recorder struct {
	proxier.Provider // nil: other methods must not be called

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

func (r *recorder) OnServiceAdd(s *v1.Service)       { r.note("add " + s.Name) }
func (r *recorder) OnServiceUpdate(_, s *v1.Service) { r.note("update " + s.Name) }
func (r *recorder) OnServiceDelete(s *v1.Service)    { r.note("delete " + s.Name) }

func (r *recorder) OnServiceSynced()                              { r.note("services synced") }
func (r *recorder) OnEndpointSlicesSynced()                       { r.note("slices synced") }
func (r *recorder) OnEndpointSliceAdd(s *discovery.EndpointSlice) { r.note("add slice " + s.Name) }
func (r *recorder) OnEndpointSliceUpdate(_, s *discovery.EndpointSlice) {
	r.note("update slice " + s.Name)
}

func (r *recorder) OnEndpointSliceDelete(s *discovery.EndpointSlice) {
	r.note("delete slice " + s.Name)
}

func (r *recorder) OnVersion(changetracker.Input, string) {}

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

func (r *recorder) eventually(t *testing.T, call string) {
	t.Helper()
	poll.Until(t, call, func() bool { return slices.Contains(r.all(), call) })
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

// fixture is a bound factory with a fake API server.
type fixture struct {
	*recorder
	client  *fake.Clientset
	factory informers.SharedInformerFactory
	stop    func()
	logs    *observer.ObservedLogs
}

func bound(t *testing.T, o Options, objects ...runtime.Object) *fixture {
	t.Helper()
	return boundWithResync(t, 0, o, objects...)
}

func boundWithResync(t *testing.T, resync time.Duration, o Options, objects ...runtime.Object) *fixture {
	t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	o.Logger = zap.New(core)
	f := &fixture{recorder: &recorder{}, client: fake.NewClientset(objects...), logs: logs}
	var watches atomic.Int32
	f.client.PrependWatchReactor("*", func(action clienttesting.Action) (bool, watch.Interface, error) {
		w, err := f.client.Tracker().Watch(action.GetResource(), action.GetNamespace())
		watches.Add(1)
		return true, w, err
	})
	f.factory = informers.NewSharedInformerFactory(f.client, resync)
	stop, err := bindFactory(f.factory, f, o)
	if err != nil {
		t.Fatalf("Bind: %v", err)
	}
	f.stop = stop
	ctx, cancel := context.WithCancel(t.Context())
	f.factory.StartWithContext(ctx)
	t.Cleanup(func() {
		stop()
		cancel()
		f.factory.Shutdown()
	})
	// The fake API server forgets: a change between a list and the watch after it is lost.
	poll.Until(t, "all are watched", func() bool { return watches.Load() >= int32(3+min(1, len(o.NodeName))) })
	return f
}

// bindFactory binds the informers of a factory.
func bindFactory(f informers.SharedInformerFactory, p proxier.EventHandler, o Options) (stop func(), err error) {
	i := Informers{
		Services: f.Core().V1().Services().Informer(), EndpointSlices: f.Discovery().V1().EndpointSlices().Informer(),
		ServiceCIDRs: f.Networking().V1().ServiceCIDRs().Informer(),
	}
	if o.NodeName != "" {
		i.Nodes = f.Core().V1().Nodes().Informer()
	}
	return Bind(i, p, o)
}

// NODE-01's spelling of names.
func TestDefaults(t *testing.T) {
	if got, want := (Options{NodeName: " Node-1\n"}).nodeName(), "node-1"; got != want {
		t.Errorf("node name %q, want %q", got, want)
	}
	_, err := bindFactory(informers.NewSharedInformerFactory(fake.NewClientset(), 0), &recorder{}, Options{NodeName: " ", WaitTimeout: -1})
	if err == nil {
		t.Fatal("Bind with bad options: no error")
	}
	for _, field := range []string{"NodeName", "WaitTimeout"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("Bind with bad options = %v, want an error that names %s", err, field)
		}
	}
}

// All objects of the first lists come before both calls of synced, each of which comes
// once (CFG-10, CFG-12).
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
		t.Errorf("calls %v: want no call for another node (CFG-05)", calls)
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

// Synced waits until the Provider, and not only the cache, has the objects (CFG-12).
func TestSyncedWaitsForTheHandler(t *testing.T) {
	for _, what := range []string{"add a", "add slice a", "node me", "cidrs"} {
		synctest.Test(t, func(t *testing.T) {
			slow := &slowRecorder{at: what, release: make(chan struct{}), reached: make(chan struct{})}
			factory := informers.NewSharedInformerFactory(fake.NewClientset(service("a", "10.96.0.1"), slice("a"), node("me", "z"), cidr("c", "10.96.0.0/16")), 0)
			stop, err := bindFactory(factory, slow, Options{NodeName: "me", WaitTimeout: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			factory.StartWithContext(ctx)
			<-slow.reached
			factory.WaitForCacheSyncWithContext(ctx)
			time.Sleep(time.Minute)
			if calls := slow.all(); slices.Contains(calls, "services synced") || slices.Contains(calls, "slices synced") {
				t.Errorf("calls %v before %q has returned, want neither of synced", calls, what)
			}
			close(slow.release)
			slow.eventually(t, "slices synced")
			stop()
			cancel()
			factory.Shutdown()
		})
	}
}

// slowRecorder blocks in one call.
type slowRecorder struct {
	recorder
	at               string
	reached, release chan struct{}
}

func (r *slowRecorder) hold(call string) {
	if call == r.at {
		close(r.reached)
		<-r.release
	}
}

func (r *slowRecorder) OnServiceAdd(s *v1.Service) {
	r.hold("add " + s.Name)
	r.recorder.OnServiceAdd(s)
}

func (r *slowRecorder) OnEndpointSliceAdd(s *discovery.EndpointSlice) {
	r.hold("add slice " + s.Name)
	r.recorder.OnEndpointSliceAdd(s)
}

func (r *slowRecorder) OnNodeChange(n changetracker.Node) {
	r.hold("node " + n.Name)
	r.recorder.OnNodeChange(n)
}

func (r *slowRecorder) OnServiceCIDRsChanged(cidrs []netip.Prefix) {
	r.hold("cidrs")
	r.recorder.OnServiceCIDRsChanged(cidrs)
}

// Each Provider of a factory gets every event. One that is bound to a running factory gets
// all objects, including the node's zone (CFG-13, CFG-30; W-16 does not happen).
func TestWhoBindsLateHearsEverything(t *testing.T) {
	f := bound(t, Options{NodeName: "me"}, service("a", "10.96.0.1"), slice("a"), node("me", "zone-a"), cidr("c", "10.96.0.0/16"))
	f.eventually(t, "slices synced")
	late := &recorder{}
	stop, err := bindFactory(f.factory, late, Options{NodeName: "me"})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	late.eventually(t, "slices synced")
	if got := late.lastNode().Zone; got != "zone-a" {
		t.Errorf("zone %q, want zone-a", got)
	}
	f.create(t, service("b", "10.96.0.2"))
	for _, r := range []*recorder{f.recorder, late} {
		for _, call := range []string{"add a", "add slice a", "cidrs", "add b"} {
			r.eventually(t, call)
		}
	}
	stop()
	f.create(t, service("c", "10.96.0.3"))
	f.eventually(t, "add c")
	if calls := late.all(); slices.Contains(calls, "add c") {
		t.Errorf("calls %v of the disconnected Provider, want no more", calls)
	}
}

// Changes and the deletion of another node are no events (CFG-05).
func TestAnotherNodeIsNoEvent(t *testing.T) {
	f := bound(t, Options{NodeName: "me"}, node("me", "z"), node("other", "z"))
	f.eventually(t, "slices synced")
	if _, err := f.client.CoreV1().Nodes().Update(t.Context(), node("other", "y"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := f.client.CoreV1().Nodes().Delete(t.Context(), "other", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.client.CoreV1().Nodes().Update(t.Context(), node("me", "x"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "the own node's change", func() bool { return f.lastNode().Zone == "x" })
	if n := count(f.all(), "node me"); n != 2 || f.logs.Len() != 0 {
		t.Errorf("%d node changes and log %v, want the own node twice and no line", n, f.logs.All())
	}
}

// An unfiltered factory delivers headless Services and those of other proxies. A Service
// whose label changes is added or removed.
func TestABoundProxierChoosesItself(t *testing.T) {
	for _, names := range []struct{ mine, theirs string }{{"", "other"}, {"mine", "other"}, {"mine", ""}} {
		none := ownedService("none", v1.ClusterIPNone, names.mine)
		client := fake.NewClientset(ownedService("a", "10.96.0.1", names.mine), ownedService("b", "10.96.0.2", names.theirs), none, slice("a", "10.244.0.1"))
		c := &cluster{engine: &proxiertest.RecordingEngine{}, logs: &observer.ObservedLogs{}}
		factory := informers.NewSharedInformerFactory(client, 0)
		p := newProxier(t, c.engine, names.mine)
		stop, err := bindFactory(factory, p, Options{ServiceProxyName: names.mine})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		factory.StartWithContext(ctx)
		var running sync.WaitGroup
		running.Go(func() {
			if err := p.Run(ctx); err != nil {
				t.Errorf("Run of the Proxier: %v", err)
			}
		})
		c.mustHold(t, "10.96.0.1=10.244.0.1")
		for _, s := range []*v1.Service{ownedService("a", "10.96.0.1", names.theirs), ownedService("b", "10.96.0.2", names.mine)} {
			if _, err := client.CoreV1().Services("test").Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		c.mustHold(t, "10.96.0.2=")
		stop()
		cancel()
		running.Wait()
		factory.Shutdown()
	}
}

// ownedService returns a Service with the label for a proxy; empty means no label.
func ownedService(name, ip, proxy string) *v1.Service {
	if proxy == "" {
		return service(name, ip)
	}
	return labelledService(name, ip, proxy)
}

// The first sync waits at most WaitTimeout for a Node that does not exist (NODE-03).
func TestTheFirstSyncWaitsOnlySoLong(t *testing.T) {
	f := bound(t, Options{NodeName: "nobody", WaitTimeout: 50 * time.Millisecond}, service("a", "10.96.0.1"))
	f.eventually(t, "slices synced")
	if f.logs.FilterMessageSnippet("first sync starts without").FilterField(zap.Strings("missing", []string{"Node nobody"})).Len() != 1 {
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

// A slice that gains the label counts as deleted, one that loses it as added (CFG-03).
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

// A missed deletion is delivered with the last known object. Objects of other types are
// logged and dropped (CFG-11).
func TestTombstonesAndWrongTypes(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	r := &recorder{}
	d := &delivery{log: zap.New(core)}
	h := handle(d, events[*v1.Service]{add: r.OnServiceAdd, update: r.OnServiceUpdate, remove: r.OnServiceDelete})
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
		t.Error("notHeadless is wrong")
	}
}

// After stop, no event reaches the Provider. Stop may be called twice, and before the
// factory is started.
func TestStopIsFinal(t *testing.T) {
	synctest.Test(t, testStopIsFinal)
}

func testStopIsFinal(t *testing.T) {
	f := bound(t, Options{}, service("a", "10.96.0.1"))
	f.eventually(t, "slices synced")
	f.stop()
	before := len(f.all())
	f.create(t, service("b", "10.96.0.2"))
	synctest.Wait()
	if got := f.all(); len(got) != before {
		t.Errorf("calls after stop: %v", got[before:])
	}
	f.stop()

	r := &recorder{}
	stop, err := bindFactory(informers.NewSharedInformerFactory(fake.NewClientset(), 0), r, Options{})
	if err != nil {
		t.Fatal(err)
	}
	stop()
	if len(r.all()) != 0 {
		t.Errorf("calls %v, want none of a factory that was not started", r.all())
	}
}

// A resync reaches the Provider as updates, but not for the Node and the ServiceCIDRs
// (CFG-01).
func TestAResyncIsCheap(t *testing.T) {
	t.Parallel()
	f := boundWithResync(t, time.Second, Options{NodeName: "me"}, service("a", "10.96.0.1"), node("me", "z"), cidr("c", "10.96.0.0/16"))
	poll.Until(t, "resyncs", func() bool { return count(f.all(), "update a") > 1 })
	if calls := f.all(); count(calls, "node me") != 1 || count(calls, "cidrs") != 1 {
		t.Errorf("calls %v, want Node and ServiceCIDRs once", calls)
	}
}

// InternalIPs come first, invalid addresses are ignored, changes of addresses, pod CIDRs
// and zone are delivered, and the last state stays after the deletion (NODE-04, NODE-06,
// CFG-30).
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
	poll.Until(t, "the node's change", func() bool { return f.lastNode().Zone == "zone-b" })
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
	poll.Until(t, "a line about the deletion", func() bool { return f.logs.FilterMessageSnippet("deleted").Len() == 1 })
	poll.Until(t, "the deletion", func() bool { return f.lastNode().Draining != "" })
	if n, last := count(f.all(), "node me"), f.lastNode(); n != 3 || last.Zone != "zone-b" || len(last.Addresses) != 1 {
		t.Errorf("%d node changes, the last one %+v, want 3 without the heartbeat, and the last state", n, last)
	}
}

// HC-30.
func TestANodeThatIsAboutToGo(t *testing.T) {
	for want, node := range map[string]*v1.Node{
		"":                          {Spec: v1.NodeSpec{Taints: []v1.Taint{{Key: "node.kubernetes.io/unschedulable"}}}},
		"the node is being deleted": {ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{}}},
		"the node has the taint ToBeDeletedByClusterAutoscaler": {Spec: v1.NodeSpec{Taints: []v1.Taint{
			{Key: "other"}, {Key: "ToBeDeletedByClusterAutoscaler", Effect: v1.TaintEffectPreferNoSchedule},
		}}},
	} {
		if got := NodeOf(node).Draining; got != want {
			t.Errorf("Draining = %q, want %q", got, want)
		}
	}
}

// The ranges are sorted, without duplicates. A range of two objects stays when one is
// deleted (CFG-20, CFG-21; W-15 does not happen).
func TestServiceCIDRsAreAddedUp(t *testing.T) {
	f := bound(t, Options{}, cidr("a", "fd00::/108", "10.96.0.0/16"), cidr("b", "10.96.0.0/16", "10.200.1.0/24", "nonsense"))
	f.eventually(t, "slices synced")
	all := "[10.96.0.0/16 10.200.1.0/24 fd00::/108]"
	poll.Until(t, all, func() bool { return text(f.lastCIDRs()) == all })
	if f.logs.FilterMessageSnippet("invalid range").Len() != 1 {
		t.Errorf("log %v, want one line about nonsense", f.logs.All())
	}
	if err := f.client.NetworkingV1().ServiceCIDRs().Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	rest := "[10.96.0.0/16 10.200.1.0/24]"
	poll.Until(t, rest, func() bool { return text(f.lastCIDRs()) == rest })
	if err := f.client.NetworkingV1().ServiceCIDRs().Delete(t.Context(), "b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "no ranges", func() bool { return len(f.lastCIDRs()) == 0 })
}

func text(cidrs []netip.Prefix) string {
	texts := make([]string, len(cidrs))
	for i, c := range cidrs {
		texts[i] = c.String()
	}
	return "[" + strings.Join(texts, " ") + "]"
}
