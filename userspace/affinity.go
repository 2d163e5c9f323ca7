package userspace

import (
	"container/list"
	"net/netip"
	"sync/atomic"
	"time"
)

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
