package proxier_test

import (
	"context"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestSyncWaitsForFlows: a Service goes while a large change of others has parts. When Sync returns, its stale flows are
// gone, as they are without parts.
func TestSyncWaitsForFlows(t *testing.T) {
	c := &fakeConntrack{}
	conntrack := c.conntrack()
	conntrack.Clean = func(ctx context.Context, family v1.IPFamily, check desired.FlowCheck) (int, error) {
		if family == v1.IPv4Protocol {
			time.Sleep(applyTakes)
		}
		return c.Clean(ctx, family, check)
	}
	inParts(t, proxier.Config{}, proxier.Deps{Conntrack: conntrack}, func(t *testing.T, f *fixture) {
		gone := proxiertest.Service("later", "gone", proxiertest.ClusterIPs("10.1.0.1"), proxiertest.Port("web", v1.ProtocolTCP, 80))
		f.OnServiceAdd(gone)
		pass(time.Second)
		var more atomic.Bool
		more.Store(true)
		go func() {
			for i := 0; more.Load(); i += 30 {
				f.manyServices("later", i, 30)
				time.Sleep(applyTakes)
			}
		}()
		pass(4 * applyTakes)
		late := 0
		for range 5 {
			f.OnServiceDelete(gone)
			before := c.count()
			if err := f.Sync(t.Context()); err != nil {
				t.Error(err)
			}
			searched := false
			c.mu.Lock()
			for _, check := range c.checks[before:] {
				for _, flows := range check.Frontends {
					searched = searched || flows.Key.VIP == netip.MustParseAddr("10.1.0.1") && flows.Gone
				}
			}
			c.mu.Unlock()
			if !searched {
				late++
			}
			f.OnServiceAdd(gone)
			if err := f.Sync(t.Context()); err != nil {
				t.Error(err)
			}
		}
		more.Store(false)
		if late > 0 {
			t.Errorf("after %d of 5 Syncs, nobody has searched for the flows of a Service that went before", late)
		}
	})
}
