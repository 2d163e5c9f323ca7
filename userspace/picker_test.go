package userspace

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/jhash"
	"github.com/serviceplane/serviceplane/internal/maglev"
)

func endpointsOf(n int) (list []netip.AddrPort) {
	for i := range n {
		list = append(list, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(i + 1)}), 80))
	}
	return list
}

// balancing returns a balancer and a function that changes its Service.
func balancing(n int, policy changetracker.Balancing, weights ...uint16) (*balancer, *desired.Service) {
	b, s := newBalancer(&affinityShare{}), &desired.Service{Cluster: desired.EndpointsOf(endpointsOf(n)...), ClusterWeights: weights, Port: &changetracker.ServicePort{Balancing: policy}}
	b.update(s)
	return b, s
}

func clientAt(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), uint16(40000+i))
}

// picked counts what clients with different addresses get; each connection stays open.
func picked(b *balancer, n int, tried ...netip.AddrPort) map[netip.AddrPort]int {
	counts := map[netip.AddrPort]int{}
	for i := range n {
		if e, ok := b.pick(desired.ScopeCluster, clientAt(i), tried, time.Time{}); ok {
			b.opens(e)
			counts[e]++
		}
	}
	return counts
}

func mustCount(t *testing.T, got map[netip.AddrPort]int, want ...int) {
	t.Helper()
	for i, e := range endpointsOf(len(want)) {
		if got[e] != want[i] {
			t.Errorf("endpoint %d is chosen %d times, want %d", i, got[e], want[i])
		}
	}
}

func TestWeightsGiveShares(t *testing.T) {
	t.Parallel()
	b, s := balancing(3, changetracker.Random, 1, 2, 5)
	mustCount(t, picked(b, 80), 10, 20, 50)
	mustCount(t, picked(b, 70, s.Cluster.Slice()[0]), 0, 20, 50)
	mustCount(t, picked(b, 9, s.Cluster.Slice()...), 0, 0, 0)
	s.ClusterWeights = nil
	b.update(s)
	mustCount(t, picked(b, 9), 3, 3, 3)
}

func TestLeastConnectionsAreChosen(t *testing.T) {
	t.Parallel()
	b, s := balancing(3, changetracker.LeastConnections)
	mustCount(t, picked(b, 9), 3, 3, 3)
	for range 3 {
		b.closes(s.Cluster.Slice()[1])
	}
	mustCount(t, picked(b, 3), 0, 3, 0)
	mustCount(t, picked(b, 2, s.Cluster.Slice()[2]), 1, 1, 0)
	s.ClusterWeights = []uint16{1, 1, 2} // 4, 4 and 3 are open
	b.update(s)
	mustCount(t, picked(b, 5), 0, 0, 5)
	if b.closes(s.Cluster.Slice()[0]); b.open[s.Cluster.Slice()[0]] != 3 {
		t.Errorf("%d connections are open, want 3", b.open[s.Cluster.Slice()[0]])
	}
	// Short connections, one after the other, go to all endpoints.
	b, _ = balancing(3, changetracker.LeastConnections)
	seen := map[netip.AddrPort]int{}
	for range 6 {
		for e := range picked(b, 1) {
			seen[e]++
			b.closes(e)
		}
	}
	mustCount(t, seen, 2, 2, 2)
	if len(b.open) != 0 {
		t.Errorf("%v are open, want none", b.open)
	}
}

// Clients hash to their slot as in the rules of nftables, and change only with their endpoint.
func TestClientsHashToTheirSlot(t *testing.T) {
	t.Parallel()
	for _, policy := range []changetracker.Balancing{changetracker.SourceHash, changetracker.SourcePortHash} {
		b, s := balancing(10, policy)
		table := maglev.Table(s.Cluster.Slice(), nil, 0)
		first := &b.scopes[0].slots[0]
		for i := range 200 {
			client, key := clientAt(i), clientAt(i)
			if policy == changetracker.SourceHash {
				key = netip.AddrPortFrom(key.Addr(), 0)
			}
			want := s.Cluster.Slice()[table[jhash.Source(key, len(table))]]
			if e, ok := b.pick(desired.ScopeCluster, client, nil, time.Time{}); e != want || !ok {
				t.Fatalf("%v: client %v gets %v, want %v", policy, client, e, want)
			}
			if e, ok := b.pick(desired.ScopeCluster, client, []netip.AddrPort{want}, time.Time{}); e == want || !ok {
				t.Fatalf("%v: client %v gets %v again, %t", policy, client, e, ok)
			}
		}
		b.update(s)
		if &b.scopes[0].slots[0] != first {
			t.Errorf("%v: the table was built again", policy)
		}
		if _, ok := b.pick(desired.ScopeCluster, clientAt(1), s.Cluster.Slice(), time.Time{}); ok {
			t.Errorf("%v: an endpoint although all are tried", policy)
		}
		s.Port = &changetracker.ServicePort{}
		b.update(s)
		mustCount(t, picked(b, 20), slices.Repeat([]int{2}, 10)...)
		s.Cluster = desired.Endpoints{}
		s.Port = &changetracker.ServicePort{Balancing: policy}
		b.update(s)
		if _, ok := b.pick(desired.ScopeCluster, clientAt(1), nil, time.Time{}); ok {
			t.Errorf("%v: an endpoint although there is none", policy)
		}
	}
}
