package userspace

import (
	"maps"
	"net/netip"
	"sync"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// balancer chooses endpoints of a service port by its load balancing policy. With session
// affinity, a client gets the same endpoint again, at all sockets of the service port.
type balancer struct {
	mu         sync.Mutex // guards all below
	scopes     [2]picker
	affinity   time.Duration
	affinities map[netip.Addr]affinity
	serving    desired.Endpoints
	open       map[netip.AddrPort]int // connections by endpoint; none is 0
	served     served
}

// affinity is the endpoint of a client with session affinity.
type affinity struct {
	endpoint netip.AddrPort
	last     time.Time
}

func newBalancer() *balancer {
	b := &balancer{affinities: map[netip.Addr]affinity{}, open: map[netip.AddrPort]int{}, served: served{&tally{}, map[netip.AddrPort]*tally{}}}
	for i := range b.scopes {
		b.scopes[i].arrived = make(chan struct{})
	}
	return b
}

func scopeIndex(s desired.Scope) int { return int(s - desired.ScopeCluster) }

// update sets endpoints, policy and session affinity. Clients keep endpoints that still
// exist.
func (b *balancer) update(s *desired.Service) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.affinity, b.serving = s.Affinity, s.Serving
	if b.affinity == 0 {
		clear(b.affinities)
	}
	for i := range b.scopes {
		b.scopes[i].update(s, desired.ScopeCluster+desired.Scope(i))
	}
	maps.DeleteFunc(b.served.endpoints, func(endpoint netip.AddrPort, _ *tally) bool { return !b.hasEndpoint(endpoint) })
}

// list returns the endpoints of a scope, and a channel that is closed when there are
// any. The caller must not modify the list.
func (b *balancer) list(scope desired.Scope) (endpoints []netip.AddrPort, arrived <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := &b.scopes[scopeIndex(scope)]
	return p.endpoints, p.arrived
}

// serves reports whether an endpoint serves, so that UDP flows to it may continue.
func (b *balancer) serves(endpoint netip.AddrPort) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.serving.Has(endpoint)
}

// pick chooses an endpoint that is not in tried. Session affinity applies only to the
// first attempt.
func (b *balancer) pick(scope desired.Scope, client netip.AddrPort, tried []netip.AddrPort, now time.Time) (endpoint netip.AddrPort, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := &b.scopes[scopeIndex(scope)]
	if a, ok := b.affinities[client.Addr()]; ok && len(tried) == 0 && p.has(a.endpoint) && now.Sub(a.last) < b.affinity {
		b.affinities[client.Addr()] = affinity{a.endpoint, now}
		return a.endpoint, true
	}
	endpoint, ok = p.pick(client, tried, b.open)
	if ok && b.affinity > 0 {
		b.affinities[client.Addr()] = affinity{endpoint, now}
	}
	return endpoint, ok
}

// opens counts a connection to an endpoint, from the attempt to open it on.
func (b *balancer) opens(endpoint netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open[endpoint]++
}

// closes ends what opens began.
func (b *balancer) closes(endpoint netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open[endpoint]--; b.open[endpoint] == 0 {
		delete(b.open, endpoint)
	}
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
