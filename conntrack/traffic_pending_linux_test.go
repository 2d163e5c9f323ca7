package conntrack

import (
	"net/netip"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/internal/flows"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// No sync waits for a reading, and an update that comes while a reading runs or ends is not lost.
func TestNoSyncWaitsForAReading(t *testing.T) {
	c := newCleaner(Options{})
	vip := netip.MustParseAddr("10.96.0.1")
	update := func(names ...string) {
		var outcomes []desired.Applied
		for i, name := range names {
			s := &desired.Service{
				Name: changetracker.ServicePortName{Port: name}, Protocol: desired.TCP,
				Frontends: []desired.Frontend{{Kind: desired.ClusterIP, VIP: vip, Port: uint16(i + 1)}},
			}
			outcomes = append(outcomes, desired.Applied{Name: s.Name, Is: s})
		}
		c.FollowTraffic(v1.IPv4Protocol, outcomes, desired.FlowCheck{}, func(*desired.Service) bool { return true })
	}
	flow := func(identity uint64, port uint16) *counting.Seen {
		return &counting.Seen{
			Identity: identity, Traffic: connection.Traffic{BytesIn: 1},
			Flow: flows.Flow{Protocol: desired.TCP, Dialled: netip.AddrPortFrom(vip, port), Server: netip.MustParseAddrPort("10.244.0.1:80")},
		}
	}
	ledger := c.traffic.families[v1.IPv4Protocol].ledger
	ports := func() int { return len(ledger.Counts().ServicePorts) }

	c.traffic.mu.Lock() // a reading
	update("a", "b")    // returns
	ledger.Ended(flow(1, 1), nil)
	if n := ports(); n != 0 {
		t.Errorf("%d service ports in a reading that began before the update", n)
	}
	c.traffic.unlock()
	c.traffic.mu.Lock()
	ledger.Ended(flow(2, 1), nil)
	if n := ports(); n != 1 {
		t.Errorf("%d service ports after the reading, want that of the update", n)
	}
	c.traffic.unlock()

	const rounds = 2000
	var running sync.WaitGroup
	running.Go(func() {
		for range rounds {
			c.traffic.mu.Lock()
			c.traffic.unlock()
		}
	})
	for range rounds {
		update("a")
		update("a", "b")
	}
	running.Wait()
	c.traffic.mu.Lock()
	defer c.traffic.unlock()
	if n := len(c.traffic.takePending()); n != 0 {
		t.Errorf("%d updates were not taken over", n)
	}
	ledger.Ended(flow(3, 2), nil)
	if n := ports(); n != 2 {
		t.Errorf("%d service ports after many readings, want both of the last update", n)
	}
}
