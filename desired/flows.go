package desired

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Flow is an entry of connection tracking, as far as it matters who serves it.
type Flow struct {
	Protocol Protocol
	// Client and Dialled are source and destination of the original direction, Server
	// is the source of the reply direction.
	Client, Dialled, Server netip.AddrPort
	// Answered says that the client has got a packet back. Until then the kernel gives
	// each packet the state NEW, but does not pass it through the nat chains again.
	Answered bool
}

// Translated says whether the destination was translated.
func (f *Flow) Translated() bool { return f.Dialled != f.Server }

// Flows says which of the flows that connection tracking remembers of one frontend
// may go on.
type Flows struct {
	Key Key
	// Serving are the endpoints that serve, sorted: ready or terminating, whatever
	// policy or topology chooses for new connections.
	Serving []netip.AddrPort
	// Restricted and SourceRanges are the frontend's.
	Restricted   bool
	SourceRanges []netip.Prefix
	// Gone says that no service port has the frontend any more.
	Gone bool
}

// FlowsOf returns which flows of a frontend of s may go on, with these servers.
func FlowsOf(s *Service, f *Frontend, servers []netip.AddrPort) Flows {
	return Flows{Key: s.Key(f), Serving: servers, Restricted: f.Restricted, SourceRanges: f.SourceRanges}
}

// Stale says whether a flow must be forgotten, so that its next packet counts as
// a new connection's.
//
// A flow from before the Service, which was never translated, must go as soon as there
// are endpoints. When the frontend is gone it is not ours to delete. A flow without an
// answer is no connection yet: source ranges and the lack of endpoints apply to it as to
// a new one, as in kube-proxy's nftables mode, whose filter rules see packets of state
// NEW. A flow with an answer goes on when the ranges narrow.
func (f *Flows) Stale(flow *Flow) bool {
	switch {
	case f.Gone:
		return flow.Translated()
	case !flow.Answered && f.Restricted && !contains(f.SourceRanges, flow.Client.Addr()):
		return true
	case len(f.Serving) == 0:
		return flow.Translated() || !flow.Answered
	}
	_, serves := slices.BinarySearchFunc(f.Serving, flow.Server, netip.AddrPort.Compare)
	return !serves
}

// Narrower says whether flows may have become stale because the source ranges are not
// those of before.
func (f *Flows) Narrower(before *Flows) bool {
	return f.Restricted && (!before.Restricted || !slices.Equal(f.SourceRanges, before.SourceRanges))
}

// FlowCheck is what a change asks of connection tracking.
type FlowCheck struct {
	// Frontends are those whose flows to look at. Their order does not matter.
	Frontends []Flows
	// NodePortAddresses are as in Globals.
	NodePortAddresses []netip.Prefix
	// LoopbackNodePorts is as in Traits.
	LoopbackNodePorts bool
	// ServiceCIDRs are ranges that only Services have addresses in, when Frontends is
	// everything: flows to other frontends in them are left from Services that
	// nobody remembers, if they were translated.
	ServiceCIDRs []netip.Prefix
}

// NewFlowCheck asks for the flows of some frontends, on a node with g, where an engine
// with t programs them. FlowsOf makes the frontends that there are; those that are gone
// have a Key and Gone alone.
func NewFlowCheck(g *Globals, t Traits, frontends ...Flows) FlowCheck {
	return FlowCheck{Frontends: frontends, NodePortAddresses: g.NodePortAddresses, LoopbackNodePorts: t.LoopbackNodePorts}
}

// Serving returns the endpoints that take traffic, sorted, without duplicates: those
// that serve, and those that are ready without serving (publishNotReadyAddresses).
func Serving(endpoints []changetracker.Endpoint) []netip.AddrPort {
	var servers []netip.AddrPort
	for i := range endpoints {
		if endpoints[i].Ready || endpoints[i].Serving {
			servers = append(servers, endpoints[i].Addr)
		}
	}
	slices.SortFunc(servers, netip.AddrPort.Compare)
	return slices.Compact(servers)
}
