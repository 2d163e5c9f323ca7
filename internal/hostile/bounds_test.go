package hostile

import (
	"encoding/json"
	"net/netip"
	"runtime"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// maxPairs is how many pairs of a frontend and an endpoint a Service makes in an IP family, and maxSources
// how many of a frontend and a source.
const maxPairs, maxSources = 1 << 19, 1 << 15

// perByte and perItem are how many bytes are allocated at most for each byte of an object, and for each
// item of the Update.
const perByte, perItem = 64, 1 << 12

// cost is what an Update asks of an engine.
type cost struct{ ports, frontends, denied, endpoints, pairs, sources int }

func costOf(u *desired.Update) (c cost) {
	for s := range u.Services() {
		c.ports++
		c.endpoints += s.Serving.Len()
		c.denied += len(s.Lost) + len(s.Refused)
		for i := range s.Frontends {
			f := &s.Frontends[i]
			c.frontends++
			c.sources += len(f.SourceRanges)
			switch {
			case f.ShortCircuit:
				c.pairs += s.Cluster.Len() + s.Local.Len()
			default:
				c.pairs += s.Endpoints(f.Scope).Len()
			}
		}
	}
	return c
}

// size is that of the objects, in bytes.
func (o *objects) size(t *testing.T) (sum int) {
	t.Helper()
	add := func(object any, size int) {
		if size > maxObject {
			t.Fatalf("an object of %d bytes, but the API server admits %d", size, maxObject)
		}
		text, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		sum += len(text)
	}
	for _, s := range o.services {
		add(s, s.Size())
	}
	for _, s := range o.slices {
		add(s, s.Size())
	}
	return sum
}

const neighbourVIP = "10.96.9.9"

func neighbour() *v1.Service {
	return proxiertest.Service("other", "neighbour", proxiertest.ClusterIPs(neighbourVIP), proxiertest.Port("http", v1.ProtocolTCP, 80))
}

func neighbourSlice(endpoint string) *discovery.EndpointSlice {
	return proxiertest.Slice("other", "neighbour", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint(endpoint))
}

// plane is what is in front of an engine.
type plane struct {
	*changetracker.Tracker

	updater  *desired.Updater
	resolver desired.Resolver
	globals  desired.Globals
}

func newPlane(t *testing.T) *plane {
	t.Helper()
	node := changetracker.Node{Name: "here", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.10")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("13.0.0.0/8")}}
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: node})
	if err != nil {
		t.Fatal(err)
	}
	return &plane{tracker, desired.NewUpdater(), desired.Resolver{Node: node}, desired.Globals{NodeAddresses: node.Addresses, PodCIDRs: node.PodCIDRs}}
}

// next returns the next Update.
func (p *plane) next(t *testing.T) (u desired.Update) {
	t.Helper()
	err := p.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		u = p.updater.Next(delta, p.resolver, p.globals, false)
		p.updater.Done(nil)
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func (p *plane) take(o *objects) {
	for _, s := range o.services {
		p.Services.Update(nil, s)
	}
	for _, s := range o.slices {
		p.Endpoints.EndpointSliceUpdate(s, false)
	}
}

// TestObjectsAtTheLimitsAreBounded: what an object costs until an engine gets its Update is in proportion to
// its size, the Update is bounded, and it has the change of another Service too.
func TestObjectsAtTheLimitsAreBounded(t *testing.T) {
	for _, o := range all(1) {
		t.Run(o.name, func(t *testing.T) {
			p := newPlane(t)
			p.Services.Update(nil, neighbour())
			p.Endpoints.EndpointSliceUpdate(neighbourSlice("11.255.0.1"), false)
			p.next(t)
			size := o.size(t)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			p.take(&o)
			p.Endpoints.EndpointSliceUpdate(neighbourSlice("11.255.0.2"), false)
			u := p.next(t)
			runtime.ReadMemStats(&after)
			got := costOf(&u)
			allocated := int(after.TotalAlloc - before.TotalAlloc)
			t.Logf("%d bytes: %+v, %d problems, %d bytes allocated, %d for each", size, got, len(p.Problems()), allocated, allocated/size)
			if got.pairs > maxPairs+got.ports || got.sources > maxSources {
				t.Errorf("%+v, want at most %d pairs and %d sources", got, maxPairs, maxSources)
			}
			if n := len(p.Problems()); n > 101*len(o.services)+101*len(o.slices) {
				t.Errorf("%d problems, want at most 101 of each object", n)
			}
			if items := got.ports + got.frontends + got.denied + got.endpoints + got.sources; allocated > perByte*size+perItem*items {
				t.Errorf("%d bytes are allocated, want at most %d for each of %d bytes, and %d for each of %d items", allocated, perByte, size, perItem, items)
			}
			if want := netip.MustParseAddrPort("11.255.0.2:8080"); !changes(&u, want) {
				t.Errorf("the Update does not have the other Service's new endpoint %v", want)
			}
		})
	}
}

func changes(u *desired.Update, endpoint netip.AddrPort) bool {
	for s := range u.Services() {
		if s.Name.Name == "neighbour" && s.Cluster.Equal(desired.EndpointsOf(endpoint)) {
			return true
		}
	}
	return false
}
