package desired

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Flow is the part of a conntrack entry that decides whether it is stale.
type Flow struct {
	Protocol Protocol
	// Client and Dialled are the source and destination of the original direction. Server is
	// the source of the reply direction.
	Client, Dialled, Server netip.AddrPort
	// Answered reports whether the client has received a packet. Until then the kernel gives each
	// packet the state NEW, but does not pass it through the nat chains again.
	Answered bool
}

// Translated reports whether the destination was translated (DNAT).
func (f *Flow) Translated() bool { return f.Dialled != f.Server }

// Flows decides which conntrack entries of one frontend are stale.
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

// Stale reports whether the conntrack entry of a flow must be deleted, so that its next packet
// counts as a new connection.
//
// A flow from before the Service existed, which was not translated, is stale as soon as there
// are endpoints. If the frontend is gone, such a flow is not ours to delete. A flow without a
// reply is not a connection yet: source ranges and missing endpoints apply to it as to a new
// one, as in kube-proxy's nftables mode, whose filter rules match state NEW. A flow with a
// reply continues when the ranges become narrower.
func (f *Flows) Stale(flow *Flow) bool {
	switch {
	case f.Gone:
		return flow.Translated()
	case !flow.Answered && f.Restricted && !contains(f.SourceRanges, flow.Client.Addr()):
		return true
	case f.Serving.Len() == 0:
		return flow.Translated() || !flow.Answered
	}
	return !f.Serving.Has(flow.Server)
}

// Ended reports whether an earlier process served the flow: see Own. Its entry would lead the
// client's next connection from the same port to a socket that is closed. If that process lingers, it
// still has the socket, and the flow must stay.
func (f *Flows) Ended(flow *Flow) bool {
	return flow.Translated() && !f.Serving.Has(flow.Server) && slices.Contains(f.Own, flow.Server.Addr())
}

// Narrower reports whether flows may have become stale because the source ranges changed.
func (f *Flows) Narrower(before *Flows) bool {
	return f.Restricted && (!before.Restricted || !slices.Equal(f.SourceRanges, before.SourceRanges))
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
