package nftables

import (
	"fmt"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestALargeServicePortServesItsOwnEndpoints: endpoints of a large Service are on this node, and dial the Service. After each
// transaction, each one that a slot leads to is masqueraded if it reaches itself.
func TestALargeServicePortServesItsOwnEndpoints(t *testing.T) {
	t.Parallel()
	s := newStepped(t, func(c *proxier.Config) { c.Node = changetracker.Node{Name: "here"} })
	service := aged("large", 0, 1)
	slice := func(first int) *discovery.EndpointSlice {
		slice := proxiertest.Slice("ns", service.Name, discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080))
		for i := first; i < first+1500; i++ {
			node := "there"
			if i%100 == 0 {
				node = "here"
			}
			proxiertest.Endpoint(fmt.Sprintf("10.244.%d.%d", i>>8, i&255), proxiertest.OnNode(node))(slice)
		}
		return slice
	}
	s.p.OnServiceAdd(service)
	s.p.OnEndpointSliceAdd(slice(0))
	s.begin()
	s.p.OnEndpointSliceUpdate(nil, slice(1500))
	broken := map[int]int{}
	netnstest.Check(t, s.sync(func(after int) {
		o := s.w.observed(t, s.reader, 1<<30)
		for _, to := range o.element[setEndpoints] {
			addr := netip.AddrFrom4([4]byte([]byte(to)[:4]))
			n := int(addr.As4()[2])<<8 + int(addr.As4()[3])
			key := hairpinKey(addr)
			if _, ok := o.element[setHairpin][string(key.bytes())]; n%100 == 0 && !ok {
				broken[after]++
			}
		}
	}))
	if len(broken) > 0 {
		t.Errorf("of %d transactions, after some there are endpoints that do not reach themselves (transaction: endpoints): %v", s.number, broken)
	}
}
