//go:build vm

package ipvs_test

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestTwoVIPsFromOneSourcePort: IPVS finds the connection of an answer by the addresses of the
// endpoint and of the client. If a client has two connections from one port to two VIPs, and both
// lead to the same endpoint, answers of the first one come from the VIP of the second one, and the
// client ignores them. This test fails when a kernel can do better: docs/ENGINES.md says it.
func TestTwoVIPsFromOneSourcePort(t *testing.T) {
	const other = "198.51.100.77"
	n := newNode(t)
	service := web()
	service.Spec.ExternalIPs = []string{other}
	n.proxy.OnServiceAdd(service)
	n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0]))
	n.synced()
	host := n.world.LocalPods[2]
	options := proxiertest.AskOptions{From: host.Addr(v1.IPv4Protocol), FromPort: 23456, Timeout: 2 * time.Second}
	first, err := host.Open(t.Context(), "tcp", netip.MustParseAddrPort(webVIP+":80"), options)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.Close() }()
	if _, err := first.Ask(t.Context()); err != nil {
		t.Fatalf("the first connection alone: %v, want an answer", err)
	}
	second, err := host.Open(t.Context(), "tcp", netip.MustParseAddrPort(other+":80"), options)
	if err != nil {
		t.Fatalf("the second connection: %v, want it to open", err)
	}
	defer func() { _ = second.Close() }()
	if _, err := second.Ask(t.Context()); err != nil {
		t.Errorf("the second connection: %v, want an answer", err)
	}
	if _, err := first.Ask(t.Context()); !errors.Is(err, proxiertest.ErrTimeout) {
		t.Errorf("the first connection beside the second one: %v, want %v as of IPVS so far", err, proxiertest.ErrTimeout)
	}
}
