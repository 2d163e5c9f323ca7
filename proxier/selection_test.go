package proxier_test

import (
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestEditSelectionDecidesOnTheNode: the engine gets the endpoints that the hook returns,
// Explain reports it, Refresh calls it again for one service port, and its panic does not
// stop the proxy.
func TestEditSelectionDecidesOnTheNode(t *testing.T) {
	var redirects, panics atomic.Bool
	config := proxier.Config{Node: changetracker.Node{Name: "here"}}
	config.EditSelection = func(view changetracker.View, _ *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection {
		if panics.Load() {
			panic("bug")
		}
		if redirects.Load() && len(s.Local) > 0 && view.Node().Name == "here" {
			s.Cluster = s.Local
		}
		return s
	}
	core, logs := observer.New(zapcore.WarnLevel)
	runWith(t, config, proxier.Deps{Logger: zap.New(core)}, func(t *testing.T, f *fixture) {
		name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: "b"}, Port: "web", Protocol: v1.ProtocolTCP}
		for _, name := range []string{"a", "b"} {
			f.OnServiceAdd(service(name, "10.0.0."+string('1'+name[0]-'a')))
			s := slice(name, "10.1.0.1", "10.1.0.2")
			s.Endpoints[1].NodeName = new("here")
			f.OnEndpointSliceAdd(s)
		}
		f.synced()
		if err := f.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := func(when string, ends int) {
			t.Helper()
			if !f.Tracker().Refresh(name) {
				t.Errorf("%s: Refresh = false, want true", when)
			}
			f.Trigger()
			pass(2 * time.Second)
			if u := f.v4.last(); u.Full || namesIn(u) != "b" || u.Changes[0].After.Cluster.Len() != ends {
				t.Errorf("%s: update is full %v of %q: %+v, want a partial one of b with %d endpoints", when, u.Full, namesIn(u), u.Changes, ends)
			}
		}
		want("no redirect", 2)
		redirects.Store(true)
		want("redirect", 1)
		e, err := f.Explain(t.Context(), desired.Packet{
			Protocol: desired.TCP, Source: netip.MustParseAddr("10.1.0.9"), Destination: netip.MustParseAddrPort("10.0.0.2:80"), Origin: desired.FromPod,
		})
		if err != nil || len(e.Endpoints) != 2 || e.Endpoints[0].Excluded != changetracker.ExcludedByHook || e.Endpoints[1].Excluded != "" {
			t.Errorf("Explain = %+v, %v, want the endpoint elsewhere left out by the hook", e.Endpoints, err)
		}
		want("the answer is the same", 1)
		panics.Store(true)
		want("it panics", 2)
		if lines := logs.FilterMessage("hook of the embedding program panicked, and counts as not called").All(); len(lines) == 0 || lines[0].ContextMap()["service"] != "test/b:web" {
			t.Errorf("logged %v, want the panic", logs.All())
		}
	})
}

// TestKindsAreAllThatIsProgrammed: without load balancers and node ports Health receives no
// updates.
func TestKindsAreAllThatIsProgrammed(t *testing.T) {
	for _, c := range []struct {
		kinds []desired.Kind
		want  string
	}{
		{nil, "[NodePort ClusterIP ExternalIP LoadBalancer] node ports [0.0.0.0/0] health 1"},
		{[]desired.Kind{desired.ClusterIP}, "[ClusterIP] node ports [] health 0"},
		{[]desired.Kind{desired.ClusterIP, desired.LoadBalancer, desired.ExternalIP}, "[ClusterIP ExternalIP LoadBalancer] node ports [] health 1"},
		{[]desired.Kind{desired.NodePort}, "[NodePort] node ports [0.0.0.0/0] health 1"},
	} {
		h := &fakeHealth{}
		runWith(t, proxier.Config{Kinds: c.kinds}, proxier.Deps{Health: h}, func(t *testing.T, f *fixture) {
			s := service("a", "10.0.0.1", loadBalancer(30001), proxiertest.ExternalIPs("192.0.2.1"))
			s.Spec.Ports[0].NodePort = 30080
			f.OnServiceAdd(s)
			f.synced()
			synctest.Wait()
			u := f.v4.last()
			var kinds []desired.Kind
			for _, f := range u.Changes[0].After.Frontends {
				kinds = append(kinds, f.Kind)
			}
			if got := fmt.Sprintf("%v node ports %v health %d", kinds, u.Globals.NodePortAddresses, len(h.take())); got != c.want {
				t.Errorf("Kinds %v: %s, want %s", c.kinds, got, c.want)
			}
			if addrs := f.v6.last().Globals.NodePortAddresses; (len(addrs) > 0) != slices.Contains(kinds, desired.NodePort) {
				t.Errorf("Kinds %v: node ports of IPv6 are accepted at %v", c.kinds, addrs)
			}
		})
	}
}
