package nftables

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// tenants is the number of service ports of the tenant in the tests below.
const tenants = 8

// tenant draws the nth service port of a tenant who varies everything that makes a class:
// affinity timeout, number of endpoints, policies and masquerading.
func (w *world) tenant(n int) *desired.Service {
	s := &desired.Service{Name: name(n), Protocol: desired.TCP}
	for i := range w.rand.IntN(60) {
		s.Cluster = s.Cluster.With(netip.AddrPortFrom(w.addr(245, i), 8080))
		if w.rand.IntN(2) == 0 {
			s.Local = s.Local.With(s.Cluster.Slice()[i])
		}
	}
	if w.rand.IntN(2) == 0 {
		s.Affinity = time.Duration(1+w.rand.IntN(86400)) * time.Second
	}
	w.balance(s, true)
	if s.Cluster.Len() > 2 { // a large table for each of the thousand changes
		s.Port.Balancing = changetracker.Random
	}
	masquerade := desired.MasqueradeNone + desired.Masquerading(w.rand.IntN(3))
	scope := desired.ScopeCluster + desired.Scope(w.rand.IntN(2))
	w.add(s, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, n), Port: 80, Scope: scope, Masquerade: masquerade})
	w.add(s, desired.Frontend{Kind: desired.NodePort, Port: uint16(30000 + n), Scope: desired.ScopeLocal, Masquerade: desired.MasqueradeNone, ShortCircuit: s.Cluster.Len() > 0})
	w.add(s, desired.Frontend{
		Kind: desired.LoadBalancer, VIP: w.addr(200, n), Port: 80, Scope: desired.ScopeCluster,
		Masquerade: desired.MasqueradeAll, Restricted: w.rand.IntN(2) == 0, SourceRanges: []netip.Prefix{netip.PrefixFrom(w.addr(0, 0), 0).Masked()},
	})
	slices.SortFunc(s.Frontends, func(a, b desired.Frontend) int { return s.Key(&a).Compare(s.Key(&b)) })
	return s
}

// victim is the service port of another tenant, with clients that have an affinity record.
type victim struct {
	*world
	net     *proxiertest.Topology
	service *desired.Service
	servers map[netip.Addr]string // by client
}

// endpoints gives the victim the first pods of the topology.
func (v *victim) endpoints(n int, affinity time.Duration) *desired.Service {
	s := &desired.Service{Name: name(1000), Protocol: desired.TCP, Affinity: affinity}
	for _, pod := range slices.Concat(v.net.LocalPods, v.net.RemotePods)[:n] {
		s.Cluster = s.Cluster.With(netip.AddrPortFrom(pod.Addr(v.family), 8080))
	}
	v.add(s, desired.Frontend{Kind: desired.ClusterIP, VIP: v.addr(96, 1000), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeAll})
	v.service = s
	return s
}

// mustStay checks that each client still gets answers from the same endpoint.
func (v *victim) mustStay(t *testing.T, when string) {
	t.Helper()
	first := v.servers == nil
	if first {
		v.servers = map[netip.Addr]string{}
	}
	for _, from := range v.net.Client.Addrs {
		if from.Is4() != v.addr(0, 0).Is4() {
			continue
		}
		a, err := v.net.Client.Ask(t.Context(), "tcp", netip.AddrPortFrom(v.addr(96, 1000), 80), proxiertest.AskOptions{From: from})
		if err != nil {
			t.Errorf("%s: %v asks: %v", when, from, err)
		} else if !first && v.servers[from] != a.Server {
			t.Errorf("%s: %v is answered by %s, want %s as before", when, from, a.Server, v.servers[from])
		}
		if first {
			v.servers[from] = a.Server
		}
	}
}

// mustCount checks that the classes are those with users and a limited number of others,
// and that the kernel has exactly their chains.
func mustCount(t *testing.T, e *Engine, most int) {
	t.Helper()
	needed := map[class]int{}
	for _, p := range e.state.placed {
		for c := range p.classes {
			needed[c]++
		}
	}
	unused := 0
	for c, n := range e.state.classes.users {
		if n != needed[c] {
			t.Fatalf("%s has %d users by the count, want %d", c.chain(), n, needed[c])
		}
		if n == 0 {
			unused++
		}
	}
	if unused != e.state.classes.unused || unused > spareClasses || len(e.state.classes.users) != len(needed)+unused {
		t.Fatalf("%d classes of %d are unused, want %d by the count and at most %d", unused, len(e.state.classes.users), e.state.classes.unused, spareClasses)
	}
	o, err := e.observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := len(e.state.layout.chains()) + len(e.state.classes.users); len(o.chains) != want || want > most {
		t.Fatalf("%d chains, want %d, and no more than %d", len(o.chains), want, most)
	}
}

// TestATenantWhoVariesEverythingMakesNoChainsPileUp changes service ports a thousand times,
// with errors of the kernel and full syncs in between.
func TestATenantWhoVariesEverythingMakesNoChainsPileUp(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		v := &victim{world: w, net: proxiertest.NewTopology(t)}
		start := func() *Engine {
			e, err := NewEngine(Config{Config: proxier.Config{NetNS: v.net.Node.NetNS()}}, w.family, proxier.Deps{})
			if err != nil {
				t.Fatalf("new engine: %v", err)
			}
			t.Cleanup(func() { e.Close() })
			return e
		}
		e, m := start(), model{}
		failAt := e.makeFaulty()
		m[name(1000)] = v.endpoints(3, time.Hour)
		mustApply(t, e, m.full(w))
		v.mustStay(t, "first")
		// The constant chains; and for each service port three frontends with two classes
		// each, two scopes and a timeout.
		const most = 40 + spareClasses + (tenants+1)*(3*2+3)
		for i := range 1000 {
			n := w.rand.IntN(tenants)
			m[name(n)] = w.tenant(n)
			if i%25 == 0 {
				failAt.Store(int64(1 + w.rand.IntN(10)))
			}
			_, err := e.Apply(t.Context(), desired.Update{Family: w.family, Changes: desired.ChangesTo(m[name(n)]), Globals: w.globals()})
			failAt.Store(0)
			if err != nil {
				mustApply(t, e, m.full(w))
			}
			if i%50 == 0 {
				mustCount(t, e, most)
			}
		}
		v.mustStay(t, "after the tenant's changes")
		for _, change := range []*desired.Service{v.endpoints(4, time.Hour), v.endpoints(4, 2*time.Hour), v.endpoints(5, 77*time.Second)} {
			m[change.Name] = change
			mustApply(t, e, desired.Update{Family: w.family, Changes: desired.ChangesTo(change), Globals: w.globals()})
			v.mustStay(t, "after a change of its own")
		}
		mustMatch(t, e, m)
		mustWriteNothing(t, e, m.full(w), "full sync")
		restarted := start()
		mustWriteNothing(t, restarted, m.full(w), "restart")
		mustCount(t, restarted, most)
		v.mustStay(t, "after a restart")
	})
}

// TestTimeoutsAddUpToFewChains gives each of thousands of service ports its own timeout.
func TestTimeoutsAddUpToFewChains(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e, m := w.engine(t, netnstest.New(t)), model{}
		for n := range 3000 {
			s := &desired.Service{
				Name: name(n), Protocol: desired.TCP, Affinity: time.Duration(1+29*n) * time.Second,
				Cluster: desired.EndpointsOf(netip.AddrPortFrom(w.addr(244, n), 80)),
			}
			w.add(s, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, n), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNone})
			m[s.Name] = s
		}
		mustApply(t, e, m.full(w))
		mustCount(t, e, 300)
		mustWriteNothing(t, e, m.full(w), "full sync")
	})
}
