package userspace

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// balancer chooses endpoints of a service port by round robin. With session affinity, a
// client gets the same endpoint again, at all sockets of the service port.
type balancer struct {
	mu         sync.Mutex // guards all below
	scopes     [2]roundRobin
	affinity   time.Duration
	affinities map[netip.Addr]affinity
	serving    []netip.AddrPort // sorted
}

// roundRobin holds the endpoints of a scope.
type roundRobin struct {
	endpoints []netip.AddrPort // sorted
	next      int
	arrived   chan struct{} // closed while there are endpoints
}

// affinity is the endpoint of a client with session affinity.
type affinity struct {
	endpoint netip.AddrPort
	last     time.Time
}

func newBalancer() *balancer {
	b := &balancer{affinities: map[netip.Addr]affinity{}}
	for i := range b.scopes {
		b.scopes[i].arrived = make(chan struct{})
	}
	return b
}

func scopeIndex(s desired.Scope) int { return int(s - desired.ScopeCluster) }

// update sets the endpoints and the session affinity. Round robin continues where it
// was, if possible; clients keep endpoints that still exist.
func (b *balancer) update(s *desired.Service) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.affinity, b.serving = s.Affinity, s.Serving
	if b.affinity == 0 {
		clear(b.affinities)
	}
	b.scopes[scopeIndex(desired.ScopeCluster)].update(s.Cluster)
	b.scopes[scopeIndex(desired.ScopeLocal)].update(s.Local)
}

func (rr *roundRobin) update(endpoints []netip.AddrPort) {
	if len(rr.endpoints) > 0 && len(endpoints) > 0 {
		rr.next, _ = slices.BinarySearchFunc(endpoints, rr.endpoints[rr.next%len(rr.endpoints)], netip.AddrPort.Compare)
	}
	wasEmpty := len(rr.endpoints) == 0
	if wasEmpty && len(endpoints) > 0 { // nodes begin with different endpoints
		rr.next = rand.IntN(len(endpoints))
	}
	rr.endpoints = endpoints
	switch {
	case wasEmpty && len(endpoints) > 0:
		close(rr.arrived)
	case !wasEmpty && len(endpoints) == 0:
		rr.arrived = make(chan struct{})
	}
}

func (rr *roundRobin) has(endpoint netip.AddrPort) bool {
	_, ok := slices.BinarySearchFunc(rr.endpoints, endpoint, netip.AddrPort.Compare)
	return ok
}

// list returns the endpoints of a scope, and a channel that is closed when there are
// any. The caller must not modify the list.
func (b *balancer) list(scope desired.Scope) (endpoints []netip.AddrPort, arrived <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	rr := &b.scopes[scopeIndex(scope)]
	return rr.endpoints, rr.arrived
}

// serves reports whether an endpoint serves, so that UDP flows to it may continue.
func (b *balancer) serves(endpoint netip.AddrPort) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := slices.BinarySearchFunc(b.serving, endpoint, netip.AddrPort.Compare)
	return ok
}

// pick chooses an endpoint that is not in tried. Session affinity applies only to the
// first attempt.
func (b *balancer) pick(scope desired.Scope, client netip.Addr, tried []netip.AddrPort, now time.Time) (endpoint netip.AddrPort, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	rr := &b.scopes[scopeIndex(scope)]
	if a, ok := b.affinities[client]; ok && len(tried) == 0 && rr.has(a.endpoint) && now.Sub(a.last) < b.affinity {
		b.affinities[client] = affinity{a.endpoint, now}
		return a.endpoint, true
	}
	for range rr.endpoints {
		endpoint = rr.endpoints[rr.next%len(rr.endpoints)]
		rr.next = (rr.next + 1) % len(rr.endpoints)
		if slices.Contains(tried, endpoint) {
			continue
		}
		if b.affinity > 0 {
			b.affinities[client] = affinity{endpoint, now}
		}
		return endpoint, true
	}
	return netip.AddrPort{}, false
}

// sweep drops session affinities that have timed out.
func (b *balancer) sweep(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for client, a := range b.affinities {
		if now.Sub(a.last) >= b.affinity {
			delete(b.affinities, client)
		}
	}
}
