package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// watch has a function that is called after each transaction.
type watch struct{ committed func(bytes int) }

type watchedKernel struct {
	kernel
	*watch
}

func (k *watchedKernel) Commit(ctx context.Context, b *nft.Batch) error {
	err := k.kernel.Commit(ctx, b)
	if k.committed != nil {
		k.committed(len(b.Buf))
	}
	return err
}

// stepped is a Proxier with one engine, and another engine that reads the table after each transaction.
type stepped struct {
	t      *testing.T
	w      *world
	p      *proxier.Proxier
	k      *watch
	engine *Engine
	reader *Engine
	number int // of transactions
	bytes  int // of the largest one
}

func newStepped(t *testing.T, configure func(*proxier.Config)) *stepped {
	t.Helper()
	return newSteppedBy(t, configure, func(e *Engine) proxier.Engine { return e })
}

func newSteppedBy(t *testing.T, configure func(*proxier.Config), wrap func(*Engine) proxier.Engine) *stepped {
	t.Helper()
	s := &stepped{t: t, w: &world{family: v1.IPv4Protocol}, k: &watch{}}
	config := proxier.Config{NetNS: netnstest.New(t).Path(), Families: []v1.IPFamily{s.w.family}, Runner: runner.Options{Gather: time.Minute}}
	if configure != nil {
		configure(&config)
	}
	engine, err := NewEngine(Config{Config: config}, s.w.family, proxier.Deps{})
	netnstest.Check(t, err)
	s.engine = engine
	s.reader, err = NewEngine(Config{Config: config}, s.w.family, proxier.Deps{})
	netnstest.Check(t, err)
	netnstest.Check(t, s.reader.connect())
	t.Cleanup(func() { s.reader.Close() })
	open := engine.open
	engine.open = func() (kernel, error) { k, err := open(); return &watchedKernel{k, s.k}, err }
	s.p, err = proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{s.w.family: wrap(engine)})
	netnstest.Check(t, err)
	poll.Background(t, s.p.Run)
	return s
}

func (s *stepped) sliceOf(service *v1.Service, endpoints ...string) *discovery.EndpointSlice {
	slice := proxiertest.Slice("ns", service.Name, discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080))
	for _, e := range endpoints {
		proxiertest.Endpoint(e)(slice)
	}
	return slice
}

func (s *stepped) add(service *v1.Service, endpoints ...string) *v1.Service {
	s.p.OnServiceAdd(service)
	s.p.OnEndpointSliceAdd(s.sliceOf(service, endpoints...))
	return service
}

func (s *stepped) begin() {
	s.p.OnServiceSynced()
	s.p.OnEndpointSlicesSynced()
	netnstest.Check(s.t, proxiertest.Sync(s.t.Context(), s.p))
}

// has says whether a set in the kernel has a frontend.
func (s *stepped) has(in setID, key desired.Key) bool {
	k := frontendKey(key)
	_, ok := s.w.observed(s.t, s.reader, 1<<30).element[in][string(k.bytes())]
	return ok
}

func (s *stepped) sync(each func(after int)) error {
	s.k.committed = func(bytes int) { s.number, s.bytes = s.number+1, max(s.bytes, bytes); each(s.number) }
	err := proxiertest.Sync(s.t.Context(), s.p)
	s.k.committed = nil
	return err
}

// aged returns a Service with the nth ClusterIP.
func aged(name string, i int, created int64, more ...proxiertest.ServiceOption) *v1.Service {
	s := proxiertest.Service("ns", name, append(more, proxiertest.ClusterIPs(fmt.Sprintf("10.96.%d.%d", i>>8, i&255)),
		proxiertest.Port("http", v1.ProtocolTCP, 80), proxiertest.Created(time.Unix(created, 0)))...)
	s.UID = types.UID(s.Name)
	return s
}

// TestALargeChangeIsManySmallTransactions deletes thousands of Services, and creates as many. Some external IPs pass
// from old ones to new ones, and from those to others that exist: they serve after each transaction.
func TestALargeChangeIsManySmallTransactions(t *testing.T) {
	t.Parallel()
	const services, every, most = 3000, 10, 128 << 10
	s := newStepped(t, nil)
	first := map[string]int{"old": 0, "new": 4096, "heir": 8192} // of the ClusterIPs
	service := func(kind string, i int, created int64, more ...proxiertest.ServiceOption) *v1.Service {
		return aged(fmt.Sprint(kind, i), first[kind]+i, created, more...)
	}
	externalIP := func(i int) string { return fmt.Sprintf("203.0.%d.%d", i>>8, i&255) }
	external := func(i int) proxiertest.ServiceOption { return proxiertest.ExternalIPs(externalIP(i)) }
	endpoints := []string{"10.244.0.1", "10.244.0.2"}
	var old []*v1.Service
	for i := range services {
		old = append(old, s.add(service("old", i, 1, external(i)), endpoints...))
	}
	for i := 0; i < services; i += every { // they claim what older ones have
		s.add(service("heir", i, 2, external(i+1), external(i+2)), endpoints...)
	}
	s.begin()
	for i, o := range old {
		s.p.OnServiceDelete(o)
		s.p.OnEndpointSliceDelete(s.sliceOf(o))
		if i%every == 0 {
			s.add(service("new", i, 3, external(i)), endpoints...)
		} else {
			s.add(service("new", i, 3), endpoints...)
		}
	}
	netnstest.Check(t, s.sync(func(after int) {
		has := s.w.observed(t, s.reader, 1<<30).element[setServices]
		for i := 0; i < services; i += every {
			for _, moved := range []int{i, i + 1, i + 2} {
				vip := netip.MustParseAddr(externalIP(moved))
				key := frontendKey(desired.Key{VIP: vip, Protocol: desired.TCP, Port: 80})
				if _, served := has[string(key.bytes())]; !served {
					t.Errorf("after transaction %d: nobody serves %v", after, vip)
				}
			}
		}
	}))
	t.Logf("%d transactions, the largest of %d bytes", s.number, s.bytes)
	if s.bytes > most || s.number < services/100 {
		t.Errorf("%d transactions, the largest of %d bytes; want none of more than %d", s.number, s.bytes, most)
	}
}

// TestALargeServicePortIsManySmallTransactions: a Service with thousands of slots comes, grows, gets other endpoints, shrinks,
// and goes. After each transaction, every slot that something leads to has an endpoint.
func TestALargeServicePortIsManySmallTransactions(t *testing.T) {
	t.Parallel()
	const most = 128 << 10 // bytes
	node := netip.MustParseAddr("192.0.2.1")
	for name, more := range map[string][]proxiertest.ServiceOption{"alone": nil, "affinity": {proxiertest.ClientAffinity(time.Hour)}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStepped(t, nil)
			options := append(more, proxiertest.ExternalIPs("203.0.113.1"), proxiertest.LoadBalancer("203.0.113.2"), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080))
			service := aged("large", 0, 1, options...)
			service.Spec.Ports = service.Spec.Ports[:1]
			s.begin()
			served := false
			for _, have := range []struct{ from, to int }{{0, 1500}, {0, 3000}, {3000, 5500}, {5000, 5001}, {0, 1500}, {0, 0}} {
				var endpoints []string
				for i := have.from; i < have.to; i++ {
					endpoints = append(endpoints, fmt.Sprintf("10.244.%d.%d", i>>8, i&255))
				}
				if len(endpoints) > 0 {
					s.p.OnServiceUpdate(nil, service)
					s.p.OnEndpointSliceUpdate(nil, s.sliceOf(service, endpoints...))
				} else {
					s.p.OnServiceDelete(service)
					s.p.OnEndpointSliceDelete(s.sliceOf(service))
				}
				s.number, s.bytes = 0, 0
				netnstest.Check(t, s.sync(func(after int) {
					if n := len(s.serves(node)); served && len(endpoints) > 0 && n != 5 {
						t.Errorf("%d to %d, after transaction %d: %d frontends, want 5", have.from, have.to, after, n)
					}
				}))
				served = true
				t.Logf("%d to %d: %d transactions, the largest of %d bytes", have.from, have.to, s.number, s.bytes)
				if s.bytes > most || s.number < 10 {
					t.Errorf("%d to %d: %d transactions, the largest of %d bytes; want none of more than %d", have.from, have.to, s.number, s.bytes, most)
				}
			}
		})
	}
}

// TestAFrontendPassesToOneThatLosesAnotherForGood: "a" gives up an external IP that nobody gets, and takes the one of
// "z", that is younger. Both lose a frontend, so "a" comes before "z"; in between are others that lose one.
func TestAFrontendPassesToOneThatLosesAnotherForGood(t *testing.T) {
	t.Parallel()
	for name, servers := range map[string][2]string{"the same endpoints": {"10.244.0.1", "10.244.0.1"}, "other endpoints": {"10.244.0.1", "10.244.0.2"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStepped(t, nil)
			const passed = "203.0.113.1"
			key := desired.Key{VIP: netip.MustParseAddr(passed), Protocol: desired.TCP, Port: 80}
			a := s.add(aged("a", 1, 1, proxiertest.ExternalIPs("203.0.113.2")), servers[0])
			s.add(aged("z", 2, 2, proxiertest.ExternalIPs(passed)), servers[1])
			var fill []*v1.Service
			for i := range 300 {
				fill = append(fill, s.add(aged(fmt.Sprint("m", i), 256+i, 3, proxiertest.ExternalIPs(fmt.Sprintf("203.1.%d.%d", i>>8, i&255))), "10.244.0.3"))
			}
			s.begin()
			s.p.OnServiceUpdate(a, aged("a", 1, 1, proxiertest.ExternalIPs(passed)))
			for i, f := range fill {
				s.p.OnServiceUpdate(f, aged(f.Name, 256+i, 3))
			}
			err := s.sync(func(after int) {
				for _, in := range []setID{setServices, setFrontends} {
					if !s.has(in, key) {
						t.Errorf("after transaction %d: %v is not in %s", after, key, setSpecs[in].name)
					}
				}
			})
			netnstest.Check(t, err)
			for _, in := range []setID{setServices, setFrontends} {
				if !s.has(in, key) {
					t.Errorf("when the sync has ended: %v is not in %s", key, setSpecs[in].name)
				}
			}
		})
	}
}

// TestAFrontRefusesWhatGoesAllTheTime: the engine behind still has the frontends of service ports that go, so the Front
// refuses them from the transaction on that deletes them.
func TestAFrontRefusesWhatGoesAllTheTime(t *testing.T) {
	t.Parallel()
	w := &world{family: v1.IPv4Protocol}
	ns := netnstest.New(t)
	f, reader := w.front(t, ns), w.front(t, ns)
	netnstest.Check(t, reader.connect())
	k := &watch{}
	open := f.open
	f.open = func() (kernel, error) { s, err := open(); return &watchedKernel{s, k}, err }
	const services = 600
	b := Behind{Holds: func(netip.Addr) bool { return true }}
	var all []*desired.Service
	gone := desired.Update{Family: w.family}
	refused := map[desired.Key]bool{}
	for i := range services {
		s := &desired.Service{Name: name(i), Protocol: desired.TCP, Cluster: desired.EndpointsOf(netip.MustParseAddrPort("10.244.0.1:8080"))}
		w.add(s, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, i), Port: 80, Scope: desired.ScopeCluster})
		all = append(all, s)
		gone.Changes = append(gone.Changes, desired.Change{Name: s.Name, Before: s})
		refused[s.Key(&s.Frontends[0])] = true
	}
	f.must(t, desired.Update{Family: w.family, Full: true, Changes: desired.ChangesTo(all...)}, b)
	transactions := 0
	k.committed = func(int) {
		transactions++
		o := w.observed(t, reader.Engine, 1<<30)
		for _, in := range []setID{setServices, setClusterIPs} {
			if n := len(o.element[in]); n != services {
				t.Errorf("after transaction %d: %d elements in %s, want %d", transactions, n, setSpecs[in].name, services)
			}
		}
	}
	f.must(t, gone, Behind{Holds: b.Holds, Refused: refused})
}

// TestANodePortPassesToAVIPOfTheNode: of an external IP that is an address of the node, and a node port of the same number,
// the older one serves. When its Service is deleted, the other one serves at once.
func TestANodePortPassesToAVIPOfTheNode(t *testing.T) {
	t.Parallel()
	node := netip.MustParseAddr("192.0.2.10")
	s := newStepped(t, func(c *proxier.Config) { c.Node = changetracker.Node{Name: "n", Addresses: []netip.Addr{node}} })
	old := proxiertest.Service("ns", "a", proxiertest.ClusterIPs("10.96.0.1"), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080), proxiertest.Created(time.Unix(1, 0)))
	s.add(old, "10.244.0.1")
	s.add(proxiertest.Service("ns", "z", proxiertest.ClusterIPs("10.96.0.2"), proxiertest.Port("http", v1.ProtocolTCP, 30080),
		proxiertest.ExternalIPs(node.String()), proxiertest.Created(time.Unix(2, 0))), "10.244.0.1")
	var fill []*v1.Service
	for i := range 300 {
		fill = append(fill, s.add(aged(fmt.Sprint("m", i), 256+i, 3), "10.244.0.3"))
	}
	s.begin()
	nodePort, vip := desired.Key{Protocol: desired.TCP, Port: 30080}, desired.Key{VIP: node, Protocol: desired.TCP, Port: 30080}
	if !s.has(setNodePorts, nodePort) || s.has(setServices, vip) {
		t.Fatal("the older one does not serve")
	}
	for _, f := range append(fill, old) {
		s.p.OnServiceDelete(f)
	}
	netnstest.Check(t, s.sync(func(after int) {
		if !s.has(setNodePorts, nodePort) && !s.has(setServices, vip) {
			t.Errorf("after transaction %d: nobody serves %v", after, vip)
		}
	}))
}

// behindFails is an engine in front of another one that fails for some service ports, as IPVS may.
type behindFails struct {
	*Engine
	failed []*proxier.ServiceError
}

func (b *behindFails) Apply(ctx context.Context, u desired.Update) (proxier.Result, error) {
	r, err := b.Engine.Apply(ctx, u)
	r.Failed, b.failed = append(r.Failed, b.failed...), nil
	return r, err
}

// TestAFrontendPassesFromAServicePortThatFailedBehind: the table has a frontend of a service port that the engine behind has not
// programmed. It passes to another service port, that is written before.
func TestAFrontendPassesFromAServicePortThatFailedBehind(t *testing.T) {
	t.Parallel()
	for name, servers := range map[string][2]string{"the same endpoints": {"10.244.0.1", "10.244.0.1"}, "other endpoints": {"10.244.0.1", "10.244.0.2"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var engine behindFails
			s := newSteppedBy(t, nil, func(e *Engine) proxier.Engine { engine.Engine = e; return &engine })
			const passed = "203.0.113.1"
			key := desired.Key{VIP: netip.MustParseAddr(passed), Protocol: desired.TCP, Port: 80}
			old := s.add(aged("b", 1, 1), servers[0])
			young := s.add(aged("x", 2, 2), servers[1])
			var fill []*v1.Service
			for i := range 300 {
				fill = append(fill, s.add(aged(fmt.Sprint("m", i), 256+i, 3), "10.244.0.3"))
			}
			s.begin()
			engine.failed = []*proxier.ServiceError{{Name: changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "x"}, Port: "http", Protocol: v1.ProtocolTCP}, Err: errors.New("refused"), Partial: true, Terminal: true}}
			s.p.OnServiceUpdate(young, aged("x", 2, 2, proxiertest.ExternalIPs(passed)))
			_ = s.sync(func(int) {})
			if !s.has(setServices, key) {
				t.Fatal("the table does not have the frontend")
			}
			s.p.OnServiceUpdate(old, aged("b", 1, 1, proxiertest.ExternalIPs(passed)))
			for _, f := range fill {
				s.p.OnEndpointSliceUpdate(nil, s.sliceOf(f, "10.244.0.4", "10.244.0.5"))
			}
			s.number = 0
			if err := s.sync(func(after int) {
				if !s.has(setServices, key) {
					t.Errorf("after transaction %d: nobody serves %v", after, key)
				}
			}); err != nil {
				t.Error(err)
			}
			if !s.has(setServices, key) {
				t.Errorf("when the sync has ended: nobody serves %v", key)
			}
		})
	}
}
