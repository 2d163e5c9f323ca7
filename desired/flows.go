package desired

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Flows say which conntrack entries of one frontend are stale: those with another server than the ones in Serving,
// and those without a reply of a client that the source ranges exclude. A connection with a reply continues when
// the ranges become narrower.
type Flows struct {
	Key Key
	// Serving are the endpoints that serve: ready or terminating, whatever traffic policy or
	// topology select for new connections.
	Serving Endpoints
	// Restricted and SourceRanges are those of the frontend.
	Restricted   bool
	SourceRanges []netip.Prefix
	// Own are addresses where this process serves the frontend with sockets, in FlowCheck.Untranslated: a
	// connection to another server there has ended with the process that served it.
	Own []netip.Addr
	// Gone says that no service port has the frontend any more.
	Gone bool
}

// FlowsOf returns the Flows of a frontend of s, with these servers.
func FlowsOf(s *Service, f *Frontend, servers Endpoints) Flows {
	return Flows{Key: s.Key(f), Serving: servers, Restricted: f.Restricted, SourceRanges: f.SourceRanges}
}

// FlowCheck is what conntrack cleaning has to check after a change.
type FlowCheck struct {
	// Frontends are those whose flows are checked, in any order.
	Frontends []Flows
	// NodePortAddresses are as in Globals.
	NodePortAddresses []netip.Prefix
	// LoopbackNodePorts is as in Traits.
	LoopbackNodePorts bool
	// ServiceCIDRs are ranges in which only Services have addresses. They are set if Frontends
	// is complete: translated flows to other frontends in these ranges are left over from
	// deleted Services.
	ServiceCIDRs []netip.Prefix
	// Untranslated are frontends of TCP whose rules may have been missing, in any order. Of
	// their flows, only unanswered ones that were not translated are stale: the client repeats
	// its first packet, and the kernel would never translate it. So are those that have Ended.
	Untranslated []Flows
	// End are frontends with EndConnections, in any order, with all endpoints of the slices as
	// Serving. Their established TCP connections to other endpoints must end. Only a
	// proxier.Conntrack with RunEnding gets them.
	End []Flows
}

// NewFlowCheck returns the check for some frontends, on a node with g and an engine with t.
// FlowsOf makes the Flows of existing frontends; those that are gone have only a Key and Gone.
func NewFlowCheck(g *Globals, t Traits, frontends ...Flows) FlowCheck {
	return FlowCheck{Frontends: frontends, NodePortAddresses: g.NodePortAddresses, LoopbackNodePorts: t.LoopbackNodePorts}
}

// Serving returns the endpoints that serve, sorted, without duplicates: those with the
// condition serving, and those that are ready without it (publishNotReadyAddresses).
func Serving(endpoints []changetracker.Endpoint) []netip.AddrPort {
	var servers []netip.AddrPort
	for i := range endpoints {
		if serves(&endpoints[i]) {
			servers = append(servers, endpoints[i].Addr)
		}
	}
	slices.SortFunc(servers, netip.AddrPort.Compare)
	return slices.Compact(servers)
}
