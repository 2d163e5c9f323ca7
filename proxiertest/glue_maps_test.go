package proxiertest_test

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// bpfMaps is a data plane of maps for BPF programs: a frontend has the number of a service,
// and a service has numbered backends. A service port keeps its number, because connections
// store it. There is no driver, only trackers.
type bpfMaps struct {
	tracker  *changetracker.Tracker
	resolver desired.Resolver
	room     int // for backends of one service

	next      uint32
	ids       map[changetracker.ServicePortName]uint32
	keys      map[changetracker.ServicePortName][]desired.Key
	frontends map[desired.Key]uint32
	backends  map[uint32][]netip.AddrPort
	fulls     int
}

func newBPFMaps(node changetracker.Node) (*bpfMaps, error) {
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, ObjectOptions: changetracker.ObjectOptions{AwaitNode: true}})
	return &bpfMaps{
		tracker: tracker, resolver: desired.Resolver{Node: node}, room: 3,
		ids: map[changetracker.ServicePortName]uint32{}, keys: map[changetracker.ServicePortName][]desired.Key{},
		frontends: map[desired.Key]uint32{}, backends: map[uint32][]netip.AddrPort{},
	}, err
}

// run writes changes until ctx ends.
func (m *bpfMaps) run(ctx context.Context) {
	select {
	case <-m.tracker.Ready(): // until then, the maps of the previous process stay
	case <-ctx.Done():
		return
	}
	for {
		_ = m.tracker.Apply(v1.IPv4Protocol, m.apply) // it fails for single service ports only
		select {
		case <-m.tracker.Changed():
		case <-ctx.Done():
			return
		}
	}
}

func (m *bpfMaps) apply(delta changetracker.Delta) (failed []changetracker.ServicePortName, err error) {
	m.resolver.Node = delta.After.Node()
	var names []changetracker.ServicePortName
	for _, change := range delta.Changes {
		names = append(names, change.Name)
	}
	if delta.Full { // write everything
		m.fulls++
		names = slices.Concat(slices.Collect(maps.Keys(m.ids)), names)
		for name := range delta.After.All() {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, changetracker.ServicePortName.Compare)
	for _, name := range slices.Compact(names) {
		s, ok := m.resolver.Resolve(delta.After, name)
		switch {
		case !ok:
			m.forget(name)
		case s.Cluster.Len() > m.room:
			failed = append(failed, name)
		default:
			m.put(s)
		}
	}
	return failed, nil
}

func (m *bpfMaps) put(s *desired.Service) {
	id, known := m.ids[s.Name]
	if !known {
		m.next++
		id = m.next
		m.ids[s.Name] = id
	}
	m.backends[id] = s.Cluster.Slice() // before the frontends that lead there
	for _, key := range m.keys[s.Name] {
		delete(m.frontends, key)
	}
	m.keys[s.Name] = nil
	for i := range s.Frontends {
		key := s.Key(&s.Frontends[i])
		m.frontends[key] = id
		m.keys[s.Name] = append(m.keys[s.Name], key)
	}
}

func (m *bpfMaps) forget(name changetracker.ServicePortName) {
	for _, key := range m.keys[name] {
		delete(m.frontends, key)
	}
	delete(m.backends, m.ids[name])
	delete(m.ids, name)
	delete(m.keys, name)
}

// A program with maps of its own uses the trackers alone.
func TestGlueOfTrackersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := newBPFMaps(changetracker.Node{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go m.run(ctx)
		web := types.NamespacedName{Namespace: "shop", Name: "web"}
		slice := func(addrs ...string) {
			options := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, 8080)}
			for _, a := range addrs {
				options = append(options, proxiertest.Endpoint(a))
			}
			m.tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, options...), false)
		}
		service := func() {
			m.tracker.Services.Update(nil, proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
		}
		key := desired.Key{VIP: netip.MustParseAddr("10.96.0.10"), Protocol: desired.TCP, Port: 80}
		want := func(when string, id uint32, ends ...string) {
			t.Helper()
			synctest.Wait()
			var got []string
			for _, e := range m.backends[m.frontends[key]] {
				got = append(got, e.Addr().String())
			}
			if m.frontends[key] != id || !slices.Equal(got, ends) || len(m.backends) != len(m.ids) {
				t.Errorf("%s: service %d with %v, want %d with %v", when, m.frontends[key], got, id, ends)
			}
		}
		service()
		slice("10.1.0.1", "10.1.0.2")
		m.tracker.Synced(changetracker.InputServices)
		m.tracker.Synced(changetracker.InputEndpointSlices)
		want("before the node is known", 0)
		m.tracker.SetNode(changetracker.Node{Name: "here"})
		want("at first", 1, "10.1.0.1", "10.1.0.2")
		slice("10.1.0.2", "10.1.0.3")
		want("an endpoint replaced", 1, "10.1.0.2", "10.1.0.3")
		slice("10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5")
		want("more than there is room for: as it was", 1, "10.1.0.2", "10.1.0.3")
		m.room = 4
		m.tracker.SetNode(changetracker.Node{Name: "here", Zone: "a"}) // causes an Apply
		want("there is room", 1, "10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5")
		name := changetracker.ServicePortName{NamespacedName: web, Port: "http", Protocol: v1.ProtocolTCP}
		m.tracker.Override(name, netip.MustParseAddrPort("10.1.0.3:8080"), changetracker.Override{Eject: true})
		want("an endpoint is sick", 1, "10.1.0.2", "10.1.0.4", "10.1.0.5")
		m.tracker.Services.Delete(web)
		want("the Service is gone", 0)
		service()
		want("it is back as another one, and the override has ended with it", 2, "10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5")
		if m.fulls != 2 {
			t.Errorf("%d full Applies, want 2: the first one, and one for the node", m.fulls)
		}
	})
}
