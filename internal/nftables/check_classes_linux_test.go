package nftables

import (
	"net/netip"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// TestACheckMissesNoSpareClass: the engine keeps the chain of a class that nobody uses, and will lead packets there without
// making it. Another program deletes it while the listeners pause. A check must find that, as a full update does.
func TestACheckMissesNoSpareClass(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		e, m := w.engine(t, ns), model{}
		mustApply(t, e, m.full(w))
		apply := func(endpoints int) {
			s := &desired.Service{Name: name(0), Protocol: desired.TCP}
			for i := range endpoints {
				s.Cluster = s.Cluster.With(endpointOf(w, i))
			}
			w.add(s, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, 0), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNonPod})
			m[s.Name] = s
			mustApply(t, e, desired.Update{Family: w.family, Globals: w.globals(), Changes: []desired.Change{{Name: s.Name, After: s}}})
		}
		apply(11)
		var spare class
		for c := range e.state.placed[name(0)].classes {
			spare = c
		}
		apply(10)
		if n, ok := e.state.classes.users[spare]; !ok || n != 0 {
			t.Fatalf("%s has %d users, want a spare class", spare.chain(), n)
		}
		b := newWire(e.batch.Family, e.batch.Table)
		b.Begin()
		for _, in := range spare.reachedFrom() {
			b.deleteMark(&setSpecs[in], uint32(spare))
		}
		b.Finish()
		k, err := e.open()
		netnstest.Check(t, err)
		defer k.Close()
		netnstest.Check(t, k.Commit(t.Context(), &b.Batch))
		b = newWire(e.batch.Family, e.batch.Table)
		b.Begin()
		b.FlushChain(spare.chain())
		b.DeleteChain(spare.chain())
		b.Finish()
		netnstest.Check(t, k.Commit(t.Context(), &b.Batch))
		if found := mustCheck(t, e); len(found) == 0 {
			t.Errorf("%s was deleted: no difference", spare.chain())
			apply(11)
			r := mustVerify(t, e, m.full(w))
			t.Errorf("the Service has so many endpoints again: %v", r.Differences)
		}
	})
}

func endpointOf(w *world, i int) netip.AddrPort { return netip.AddrPortFrom(w.addr(244, i), 8080) }
