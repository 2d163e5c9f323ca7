package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// served counts the connections that a service port's endpoints got.
type served struct {
	all       uint64
	endpoints map[netip.AddrPort]uint64 // those that the service port has
}

// connected counts a connection to an endpoint.
func (b *balancer) connected(endpoint netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.served.all++
	if b.hasEndpoint(endpoint) {
		b.served.endpoints[endpoint]++
	}
}

// hasEndpoint reports whether an endpoint is in a scope. The caller holds mu.
func (b *balancer) hasEndpoint(endpoint netip.AddrPort) bool {
	return b.scopes[0].has(endpoint) || b.scopes[1].has(endpoint)
}

// counts returns the numbers, with a sorted list of endpoints.
func (b *balancer) counts() (of proxier.ServicePortCounts) {
	b.mu.Lock()
	defer b.mu.Unlock()
	of.Connections = b.served.all
	for endpoint, n := range b.served.endpoints {
		of.Endpoints = append(of.Endpoints, proxier.EndpointCounts{Endpoint: endpoint, Connections: n})
	}
	slices.SortFunc(of.Endpoints, func(a, b proxier.EndpointCounts) int { return a.Endpoint.Compare(b.Endpoint) })
	return of
}

// Counts implements proxier.Counter: it counts the connections, and the flows of UDP clients, that
// were opened to an endpoint.
func (e *Engine) Counts(context.Context) (proxier.Counts, error) {
	if !e.config.CountConnections {
		return proxier.Counts{}, fmt.Errorf("CountConnections is off: %w", errors.ErrUnsupported)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	all := proxier.Counts{Since: e.began}
	for name, s := range e.services {
		of := s.balancer.counts()
		if of.Name = name; of.Connections > 0 {
			all.ServicePorts = append(all.ServicePorts, of)
		}
	}
	slices.SortFunc(all.ServicePorts, func(a, b proxier.ServicePortCounts) int { return a.Name.Compare(b.Name) })
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
