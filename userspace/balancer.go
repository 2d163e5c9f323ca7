package userspace

import (
	"container/list"
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
	affinities affinities
	serving    desired.Endpoints
	open       map[netip.AddrPort]int // connections by endpoint; none is 0
	served     served
}

func newBalancer(share *affinityShare) *balancer {
	b := &balancer{affinities: affinities{share: share, clients: map[netip.Addr]*list.Element{}}, open: map[netip.AddrPort]int{}, served: served{&tally{}, map[netip.AddrPort]*tally{}}}
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
	b.affinities.update(s.Affinity)
	b.serving = s.Serving
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
	if endpoint, ok = b.affinities.of(client.Addr(), now); !ok || len(tried) > 0 || !p.has(endpoint) {
		endpoint, ok = p.pick(client, tried, b.open)
	}
	if ok {
		b.affinities.note(client.Addr(), endpoint, now)
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
	b.affinities.sweep(now)
}

// end is for a service port that is removed: others share what its clients had.
func (b *balancer) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.affinities.update(0)
}
