package userspace

import (
	"container/list"
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
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
	open       map[netip.AddrPort]int     // connections by endpoint; none is 0
	all        totals                     // of the service port
	tallies    map[netip.AddrPort]*totals // of the endpoints that the service port has
}

func newBalancer(share *affinityShare) *balancer {
	b := &balancer{affinities: affinities{share: share, clients: map[netip.Addr]*list.Element{}}, open: map[netip.AddrPort]int{}, tallies: map[netip.AddrPort]*totals{}}
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
	maps.DeleteFunc(b.tallies, func(endpoint netip.AddrPort, _ *totals) bool { return !b.hasEndpoint(endpoint) })
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

const (
	// affinityRecords is how many clients with session affinity one IP family knows at a time, leastAffinityRecords
	// how many a service port has at least.
	affinityRecords, leastAffinityRecords = 1 << 18, 1 << 8
)

// affinityShare divides affinityRecords equally among the service ports with session affinity, so that one
// with clients without number takes nothing from others.
type affinityShare struct{ ports atomic.Int64 }

func (s *affinityShare) records() int {
	return max(affinityRecords/int(max(s.ports.Load(), 1)), leastAffinityRecords)
}

// affinities are the endpoints of the clients of a service port. If there are too many, the client is
// forgotten that has not connected for the longest time. The balancer's lock guards it.
type affinities struct {
	share   *affinityShare
	timeout time.Duration // 0: no session affinity
	clients map[netip.Addr]*list.Element
	order   list.List // of affinity, the last one to connect first
}

// affinity is the endpoint of a client with session affinity.
type affinity struct {
	client   netip.Addr
	endpoint netip.AddrPort
	last     time.Time
}

// update sets the timeout.
func (a *affinities) update(timeout time.Duration) {
	switch had := a.timeout > 0; {
	case !had && timeout > 0:
		a.share.ports.Add(1)
	case had && timeout == 0:
		a.share.ports.Add(-1)
		clear(a.clients)
		a.order.Init()
	}
	a.timeout = timeout
}

// of returns the endpoint of a client.
func (a *affinities) of(client netip.Addr, now time.Time) (endpoint netip.AddrPort, ok bool) {
	e := a.clients[client]
	if e == nil {
		return netip.AddrPort{}, false
	}
	record, _ := e.Value.(affinity)
	return record.endpoint, now.Sub(record.last) < a.timeout
}

// note remembers the endpoint that a client got.
func (a *affinities) note(client netip.Addr, endpoint netip.AddrPort, now time.Time) {
	if a.timeout == 0 {
		return
	}
	record := affinity{client, endpoint, now}
	if e := a.clients[client]; e != nil {
		e.Value = record
		a.order.MoveToFront(e)
	} else {
		a.clients[client] = a.order.PushFront(record)
	}
	for most := a.share.records(); len(a.clients) > most; {
		a.forgetLast()
	}
}

// sweep forgets clients whose affinity has timed out.
func (a *affinities) sweep(now time.Time) {
	for e := a.order.Back(); e != nil; e = a.order.Back() {
		if record, _ := e.Value.(affinity); now.Sub(record.last) < a.timeout {
			return
		}
		a.forgetLast()
	}
}

func (a *affinities) forgetLast() {
	record, _ := a.order.Remove(a.order.Back()).(affinity)
	delete(a.clients, record.client)
}
