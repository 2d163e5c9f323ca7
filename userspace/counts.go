package userspace

import (
	"context"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// totals counts connections and the bytes that pass, to the endpoint (in) and from it (out).
type totals struct{ connections, in, out atomic.Uint64 }

// numbers returns those that config asks for.
func (t *totals) numbers(config *Config) (connections uint64, traffic connection.Traffic) {
	if config.CountConnections {
		connections = t.connections.Load()
	}
	if config.CountTraffic {
		traffic = connection.Traffic{BytesIn: t.in.Load(), BytesOut: t.out.Load()}
	}
	return connections, traffic
}

// tap counts the bytes of a connection: for the service port, and for the endpoint. That of an
// endpoint that is gone counts no more.
type tap struct{ all, endpoint *totals }

func (t tap) in(n int64) {
	t.all.in.Add(uint64(n))
	t.endpoint.in.Add(uint64(n))
}

func (t tap) out(n int64) {
	t.all.out.Add(uint64(n))
	t.endpoint.out.Add(uint64(n))
}

// connected counts a connection to an endpoint, and returns what counts its bytes.
func (b *balancer) connected(endpoint netip.AddrPort) tap {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := tap{&b.all, b.tallies[endpoint]}
	if t.endpoint == nil {
		t.endpoint = &totals{}
		if b.hasEndpoint(endpoint) {
			b.tallies[endpoint] = t.endpoint
		}
	}
	t.all.connections.Add(1)
	t.endpoint.connections.Add(1)
	return t
}

// hasEndpoint reports whether an endpoint is in a scope. The caller holds mu.
func (b *balancer) hasEndpoint(endpoint netip.AddrPort) bool {
	return b.scopes[0].has(endpoint) || b.scopes[1].has(endpoint)
}

// counts returns the numbers that config asks for, with a sorted list of endpoints.
func (b *balancer) counts(config *Config) (of connection.ServicePortCounts) {
	b.mu.Lock()
	defer b.mu.Unlock()
	of.Connections, of.Traffic = b.all.numbers(config)
	for endpoint, t := range b.tallies {
		connections, traffic := t.numbers(config)
		of.Endpoints = append(of.Endpoints, connection.EndpointCounts{Endpoint: endpoint, Connections: connections, Traffic: traffic})
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
