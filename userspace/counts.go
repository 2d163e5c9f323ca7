package userspace

import (
	"context"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/serviceplane/serviceplane/connection"
	"github.com/serviceplane/serviceplane/internal/counting"
)

// served counts the connections that a service port's endpoints got.
type served struct {
	all       *tally
	endpoints map[netip.AddrPort]*tally // those that the service port has
}

// tally counts connections and the bytes that pass, to the endpoint (in) and from it (out).
type tally struct{ connections, in, out atomic.Uint64 }

func (t *tally) traffic(counted bool) connection.Traffic {
	if !counted {
		return connection.Traffic{}
	}
	return connection.Traffic{BytesIn: t.in.Load(), BytesOut: t.out.Load()}
}

// tap counts the bytes of a connection: for the service port, and for the endpoint. That of an
// endpoint that is gone counts no more.
type tap struct{ all, endpoint *tally }

func (t tap) in(n int64) {
	t.all.in.Add(uint64(n))
	t.endpoint.in.Add(uint64(n))
}

func (t tap) out(n int64) {
	t.all.out.Add(uint64(n))
	t.endpoint.out.Add(uint64(n))
}

// connected counts a connection to an endpoint.
func (b *balancer) connected(endpoint netip.AddrPort) {
	t := b.tapOf(endpoint)
	t.all.connections.Add(1)
	t.endpoint.connections.Add(1)
}

// tapOf returns what counts the bytes of a connection to an endpoint.
func (b *balancer) tapOf(endpoint netip.AddrPort) tap {
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.served.endpoints[endpoint]
	if of == nil {
		of = &tally{}
		if b.hasEndpoint(endpoint) {
			b.served.endpoints[endpoint] = of
		}
	}
	return tap{b.served.all, of}
}

// hasEndpoint reports whether an endpoint is in a scope. The caller holds mu.
func (b *balancer) hasEndpoint(endpoint netip.AddrPort) bool {
	return b.scopes[0].has(endpoint) || b.scopes[1].has(endpoint)
}

// counts returns the numbers that config asks for, with a sorted list of endpoints.
func (b *balancer) counts(config *Config) (of connection.ServicePortCounts) {
	b.mu.Lock()
	defer b.mu.Unlock()
	connections := func(t *tally) uint64 {
		if !config.CountConnections {
			return 0
		}
		return t.connections.Load()
	}
	of.Connections, of.Traffic = connections(b.served.all), b.served.all.traffic(config.CountTraffic)
	for endpoint, t := range b.served.endpoints {
		of.Endpoints = append(of.Endpoints, connection.EndpointCounts{Endpoint: endpoint, Connections: connections(t), Traffic: t.traffic(config.CountTraffic)})
	}
	slices.SortFunc(of.Endpoints, func(a, b connection.EndpointCounts) int { return a.Endpoint.Compare(b.Endpoint) })
	return of
}

// Counts is for proxier.Abilities: it counts the connections, and the flows of UDP clients, that
// were opened to an endpoint, and the bytes that it copied.
func (e *Engine) Counts(context.Context) (connection.Counts, error) {
	if !e.config.CountConnections && !e.config.CountTraffic {
		return connection.Counts{}, counting.ErrOff
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	all := connection.Counts{Since: e.began, Connections: e.config.CountConnections, Traffic: e.config.CountTraffic}
	for name, s := range e.services {
		of := s.balancer.counts(&e.config)
		if of.Name = name; of.Connections > 0 || of.Traffic != (connection.Traffic{}) {
			all.ServicePorts = append(all.ServicePorts, of)
		}
	}
	slices.SortFunc(all.ServicePorts, func(a, b connection.ServicePortCounts) int { return a.Name.Compare(b.Name) })
	return all, nil
}

// begin notes when counting began.
func (e *Engine) begin() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.began.IsZero() {
		e.began = time.Now()
	}
}
