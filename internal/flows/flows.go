// Package flows decides which flows of connection tracking are stale, given the current Services. It is pure.
package flows

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// Flow is the part of a conntrack entry that decides whether it is stale.
type Flow struct {
	Protocol desired.Protocol
	// Client and Dialled are the source and destination of the original direction. Server is
	// the source of the reply direction.
	Client, Dialled, Server netip.AddrPort
	// Answered reports whether the client has received a packet. Until then the kernel gives each
	// packet the state NEW, but does not pass it through the nat chains again.
	Answered bool
}

// Translated reports whether the destination was translated (DNAT).
func (f *Flow) Translated() bool { return f.Dialled != f.Server }

// stale reports whether the conntrack entry of a flow of a frontend must be deleted, so that its next packet
// counts as a new connection.
//
// A flow from before the Service existed, which was not translated, is stale as soon as there
// are endpoints. If the frontend is gone, such a flow is not ours to delete. A flow without a
// reply is not a connection yet: source ranges and missing endpoints apply to it as to a new
// one, as in kube-proxy's nftables mode, whose filter rules match state NEW. A flow with a
// reply continues when the ranges become narrower.
func stale(f *desired.Flows, flow *Flow) bool {
	switch {
	case f.Gone:
		return flow.Translated()
	case !flow.Answered && f.Restricted && !within(f.SourceRanges, flow.Client.Addr()):
		return true
	case f.Serving.Len() == 0:
		return flow.Translated() || !flow.Answered
	}
	return !f.Serving.Has(flow.Server)
}

// ended reports whether an earlier process served the flow: see desired.Flows.Own. Its entry would lead the
// client's next connection from the same port to a socket that is closed. If that process lingers, it
// still has the socket, and the flow must stay.
func ended(f *desired.Flows, flow *Flow) bool {
	return flow.Translated() && !f.Serving.Has(flow.Server) && slices.Contains(f.Own, flow.Server.Addr())
}
