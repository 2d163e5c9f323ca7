package desired

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Flows says which of the flows that connection tracking remembers of one frontend
// may go on.
type Flows struct {
	Key Key
	// Servers are the endpoints that serve, sorted: ready or terminating, whatever
	// policy or topology chooses for new connections.
	Servers []netip.AddrPort
	// Gone says that no service port has the frontend any more.
	Gone bool
}

// Stale says whether a flow must be forgotten, so that its next packet counts as
// a new connection's. dialled is what the client sent to, server is who answers:
// the same for a flow from before the Service, which was never translated. Such a
// flow is in the way as soon as there are endpoints; when the frontend is gone, or
// nobody serves, it is not ours to delete.
func (f *Flows) Stale(dialled, server netip.AddrPort) bool {
	if f.Gone || len(f.Servers) == 0 {
		return dialled != server
	}
	_, serves := slices.BinarySearchFunc(f.Servers, server, netip.AddrPort.Compare)
	return !serves
}

// FlowCheck is what a change asks of connection tracking.
type FlowCheck struct {
	// Frontends are those whose flows to look at. Their order does not matter.
	Frontends []Flows
	// NodePortAddresses are as in Globals.
	NodePortAddresses []netip.Prefix
	// Orphanage are ranges that only Services have addresses in, when Frontends is
	// everything: flows to other frontends in them are left from Services that
	// nobody remembers, if they were translated.
	Orphanage []netip.Prefix
}

// Servers returns the endpoints that serve, sorted, without duplicates.
func Servers(endpoints []changetracker.Endpoint) []netip.AddrPort {
	var servers []netip.AddrPort
	for i := range endpoints {
		if endpoints[i].Serving {
			servers = append(servers, endpoints[i].Addr)
		}
	}
	slices.SortFunc(servers, netip.AddrPort.Compare)
	return slices.Compact(servers)
}
