package userspace

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// TestClientsWithoutNumberAreForgotten: a flood of addresses at one service port costs no more than its
// share, and takes nothing from another; who connects again and again stays.
func TestClientsWithoutNumberAreForgotten(t *testing.T) {
	share := &affinityShare{}
	sticky := &desired.Service{Cluster: desired.EndpointsOf(endpointsOf(50)...), Affinity: 3 * time.Hour}
	flooded, other := newBalancer(share), newBalancer(share)
	for _, b := range []*balancer{flooded, other} {
		b.update(sticky)
	}
	now := time.Now()
	get := func(b *balancer, client netip.Addr) netip.AddrPort {
		now = now.Add(time.Microsecond)
		endpoint, ok := b.pick(desired.ScopeCluster, netip.AddrPortFrom(client, 1), nil, now)
		if !ok {
			t.Fatal("no endpoint")
		}
		return endpoint
	}
	stranger := func(n uint64) netip.Addr { // of one /64
		var b [16]byte
		b[0] = 0x20
		binary.BigEndian.PutUint64(b[8:], n)
		return netip.AddrFrom16(b)
	}
	faithful, quiet := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	want, wantOther := get(flooded, faithful), get(other, quiet)
	for n := range uint64(2 * affinityRecords) {
		get(flooded, stranger(n))
		if n%1000 == 0 && get(flooded, faithful) != want {
			t.Fatalf("after %d other clients: another endpoint", n)
		}
	}
	if got := get(other, quiet); got != wantOther {
		t.Error("a client of another service port has lost its endpoint")
	}
	if n := len(flooded.affinities.clients); n != affinityRecords/2 || flooded.affinities.order.Len() != n {
		t.Errorf("%d clients are known, %d in order, want half of %d", n, flooded.affinities.order.Len(), affinityRecords)
	}
	other.end()
	if got := share.records(); got != affinityRecords {
		t.Errorf("without the other service port, the share is %d, want all %d", got, affinityRecords)
	}
	flooded.sweep(now.Add(4 * time.Hour))
	if n := len(flooded.affinities.clients); n != 0 {
		t.Errorf("%d clients are known after the timeout, want none", n)
	}
	share.ports.Store(1 << 20)
	if got := share.records(); got != leastAffinityRecords {
		t.Errorf("among a million service ports the share is %d, want %d", got, leastAffinityRecords)
	}
}
