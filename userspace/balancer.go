package userspace

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// balancer chooses endpoints of a service port in turn, and the same one again for a
// client that has session affinity, whatever socket it comes to.
type balancer struct {
	mu       sync.Mutex // guards all below
	scopes   [2]turn
	affinity time.Duration
	records  map[netip.Addr]record
	servers  []netip.AddrPort // sorted
}

// turn is whose turn it is among the endpoints of a scope.
type turn struct {
	endpoints []netip.AddrPort // sorted
	next      int
	// arrived is closed when there are endpoints.
	arrived chan struct{}
}

// record is where a client with session affinity was sent, and when.
type record struct {
	endpoint netip.AddrPort
	last     time.Time
}

func newBalancer() *balancer {
	b := &balancer{records: map[netip.Addr]record{}}
	for i := range b.scopes {
		b.scopes[i].arrived = make(chan struct{})
	}
	return b
}

func scopeIndex(s desired.Scope) int { return int(s - desired.ScopeCluster) }

// update takes over what the service port is now. The turns go on where they were,
// as far as possible; clients stay where their endpoint does.
func (b *balancer) update(s *desired.Service) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.affinity, b.servers = s.Affinity, s.Serving
	if b.affinity == 0 {
		clear(b.records)
	}
	b.scopes[scopeIndex(desired.ScopeCluster)].update(s.Cluster)
	b.scopes[scopeIndex(desired.ScopeLocal)].update(s.Local)
}

func (t *turn) update(endpoints []netip.AddrPort) {
	if len(t.endpoints) > 0 && len(endpoints) > 0 {
		t.next, _ = slices.BinarySearchFunc(endpoints, t.endpoints[t.next%len(t.endpoints)], netip.AddrPort.Compare)
	}
	wasEmpty := len(t.endpoints) == 0
	if wasEmpty && len(endpoints) > 0 { // not every node begins with the same one
		t.next = rand.IntN(len(endpoints))
	}
	t.endpoints = endpoints
	switch {
	case wasEmpty && len(endpoints) > 0:
		close(t.arrived)
	case !wasEmpty && len(endpoints) == 0:
		t.arrived = make(chan struct{})
	}
}

func (t *turn) has(endpoint netip.AddrPort) bool {
	_, ok := slices.BinarySearchFunc(t.endpoints, endpoint, netip.AddrPort.Compare)
	return ok
}

// list is what there is to choose from, and a channel that is closed as soon as that
// is something. The list is not written to.
func (b *balancer) list(scope desired.Scope) (endpoints []netip.AddrPort, arrived <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := &b.scopes[scopeIndex(scope)]
	return t.endpoints, t.arrived
}

// serves says whether connections to an endpoint may go on.
func (b *balancer) serves(endpoint netip.AddrPort) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := slices.BinarySearchFunc(b.servers, endpoint, netip.AddrPort.Compare)
	return ok
}

// pick chooses an endpoint that is none of tried. A client's record counts only for
// its first attempt.
func (b *balancer) pick(scope desired.Scope, client netip.Addr, tried []netip.AddrPort, now time.Time) (endpoint netip.AddrPort, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := &b.scopes[scopeIndex(scope)]
	if r, known := b.records[client]; known && len(tried) == 0 && t.has(r.endpoint) && now.Sub(r.last) < b.affinity {
		b.records[client] = record{r.endpoint, now}
		return r.endpoint, true
	}
	for range t.endpoints {
		endpoint = t.endpoints[t.next%len(t.endpoints)]
		t.next = (t.next + 1) % len(t.endpoints)
		if slices.Contains(tried, endpoint) {
			continue
		}
		if b.affinity > 0 {
			b.records[client] = record{endpoint, now}
		}
		return endpoint, true
	}
	return netip.AddrPort{}, false
}

// sweep forgets clients whose time is up.
func (b *balancer) sweep(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for client, r := range b.records {
		if now.Sub(r.last) >= b.affinity {
			delete(b.records, client)
		}
	}
}
