package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestConnectionsDuringTheEndOfALargeServicePort: a frontend passes from a Service with thousands of endpoints. While the old
// slots are deleted, the connections to the new Service are its own.
func TestConnectionsDuringTheEndOfALargeServicePort(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	s := newStepped(t, func(c *proxier.Config) { c.CountConnections, c.NetNS = true, ns.Path() })
	const passed = "203.0.113.1"
	var endpoints []string
	for i := range 3000 {
		endpoints = append(endpoints, fmt.Sprintf("10.244.%d.%d", i>>8, i&255))
	}
	old := s.add(aged("old", 1, 1, proxiertest.ExternalIPs(passed)), endpoints...)
	s.add(aged("young", 2, 2, proxiertest.ExternalIPs(passed)), "10.245.0.1")
	s.begin()
	s.p.OnServiceDelete(old)
	key := frontendKey(desired.Key{VIP: netip.MustParseAddr(passed), Protocol: desired.TCP, Port: 80})
	first := string(key.bytes()) + string(binary.NativeEndian.AppendUint32(nil, 0))
	has := 0
	netnstest.Check(t, s.sync(func(after int) {
		o := s.w.observed(t, s.reader, 1<<30)
		to := o.element[setEndpoints][first]
		if len(to) < 4 || netip.AddrFrom4([4]byte([]byte(to)[:4])) != netip.MustParseAddr("10.245.0.1") {
			return
		}
		if has++; has == 2 { // what a packet does
			mustNFT(t, ns, fmt.Sprintf("add element ip serviceplane endpoint-counters { %s . tcp . 80 . 0x00000000 counter packets 7 bytes 7 }", passed))
		}
	}))
	if has < 2 {
		t.Fatalf("of %d transactions, %d follow the one that passes the frontend", s.number, has-1)
	}
	counts, err := s.engine.Counts(t.Context())
	netnstest.Check(t, err)
	for _, c := range counts.ServicePorts {
		if c.Name.Name == "young" && c.Connections == 7 {
			return
		}
	}
	t.Errorf("after 7 connections to young: %+v", counts.ServicePorts)
}
