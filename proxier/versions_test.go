package proxier_test

import (
	"math"
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestVersionsAreFree: a source that says OnVersion costs no allocation more a sync, while nobody
// asks for the Status. AllocsPerRun counts those of all goroutines, so it is not parallel.
func TestVersionsAreFree(t *testing.T) {
	const syncs, tries = 200, 5
	e := &fakeEngine{}
	p, err := proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: e})
	if err != nil {
		t.Fatal(err)
	}
	p.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.1"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	var slices [2]*discovery.EndpointSlice // a change replaces one by the other
	for i := range slices {
		slices[i] = proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
			proxiertest.Endpoint("10.244.0."+strconv.Itoa(1+i)))
	}
	versions := [...]string{"41", "42"}
	n := 0
	change := func(says bool) {
		n++
		e.mu.Lock()
		e.seen = e.seen[:0] // so that it does not grow
		e.mu.Unlock()
		p.OnEndpointSliceUpdate(nil, slices[n%2])
		if says {
			p.OnVersion(changetracker.InputEndpointSlices, versions[n%2])
		}
		if err := p.SyncNow(t.Context()); err != nil {
			t.Error(err)
		}
		if len(e.updates()) == 0 {
			t.Error("a sync without an Update")
		}
	}
	// The least of several: other goroutines of the test allocate now and then.
	least := func(f func()) float64 {
		least := math.Inf(1)
		for range tries {
			least = min(least, testing.AllocsPerRun(syncs, f))
		}
		return least
	}
	without, with := least(func() { change(false) }), least(func() { change(true) })
	if with > without || without == 0 {
		t.Errorf("a sync has %v allocations with OnVersion, %v without", with, without)
	}
	alone := least(func() {
		n++
		p.OnVersion(changetracker.InputEndpointSlices, versions[n%2])
	})
	if alone != 0 {
		t.Errorf("OnVersion has %v allocations, want none", alone)
	}
	t.Logf("allocations: a change and its sync %v, with OnVersion %v, OnVersion alone %v", without, with, alone)
	if v := p.Status().Families[v1.IPv4Protocol].Versions.EndpointSlices; v != versions[n%2] {
		t.Errorf("the Status has version %q, want %q", v, versions[n%2])
	}
}
