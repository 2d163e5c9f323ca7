package metrics

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/canary"
	"github.com/serviceplane/serviceplane/connection"
	"github.com/serviceplane/serviceplane/endpointhealth"
	"github.com/serviceplane/serviceplane/proxier"
)

// Sources are functions that each scrape calls, perhaps several scrapes at once. The metrics of a
// nil one are missing.
type Sources struct {
	// Status is the Provider's.
	Status func() proxier.Status
	// APIServer reports whether the API server answers, and how often it did not:
	// informer.Link.Reachable.
	APIServer func() (reachable bool, failures uint64)
	// Counts returns the numbers of connections: Proxier.Counts, with Config.CountConnections or
	// Config.CountTraffic. What is not counted has no metric. See Options.MaxCounted.
	Counts func(context.Context, v1.IPFamily) (connection.Counts, error)
	// Canary returns the results of a canary: canary.Canary.Status.
	Canary func() map[v1.IPFamily]canary.FamilyStatus
	// EndpointHealth returns the results of health checks: endpointhealth.Checker.Status.
	EndpointHealth func() endpointhealth.Status
	// Sockets returns numbers of sockets: Engine.SocketCounts of package ebpf. After an error, a
	// scrape lacks them.
	Sockets func(v1.IPFamily) (Sockets, error)
	// Forwarded returns how many packets were forwarded past the rules, and how many of them to the
	// other end of a veth: Engine.ForwardCounts of package ebpf. An error means that there are none.
	Forwarded func(v1.IPFamily) (packets, toPeer uint64, err error)
	// LocalhostNodePorts and Invalid read the kernel's counts of packets: those of
	// iptables.Counters. While one returns false, its metric is missing.
	LocalhostNodePorts, Invalid func() (packets uint64, ok bool)
}

// Sockets are numbers of sockets of an IP family that have connected to a frontend which sockets have, in mode
// "ebpf". They only grow, until what counts them is removed; Ended begins anew with the process.
type Sockets struct {
	// Translated sockets go to an endpoint.
	Translated uint64
	// Left to the rules, by reason.
	Left map[string]uint64
	// Ended are UDP sockets that were ended because their endpoint was gone.
	Ended uint64
}

// Watch replaces the sources.
func (m *Metrics) Watch(s Sources) { m.scraped.sources.Store(&s) }
