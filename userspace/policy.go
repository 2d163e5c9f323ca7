package userspace

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// policy decides which clients a socket serves, and by which endpoints: as a frontend says.
type policy struct {
	*desired.Frontend

	pods []netip.Prefix
	node []netip.Addr
}

// These are the policies behind portals, which have checked the client.
var (
	toCluster = policy{Frontend: &desired.Frontend{Scope: desired.ScopeCluster, Action: desired.Forward}} // read-only
	toLocal   = policy{Frontend: &desired.Frontend{Scope: desired.ScopeLocal, Action: desired.Forward}}   // read-only
)

// admit returns by which endpoints a client is served; 0 means that the source ranges exclude it.
func (p *policy) admit(client netip.Addr) desired.Scope {
	if p.Restricted && !contains(p.SourceRanges, client) {
		return 0
	}
	if p.ShortCircuit && (contains(p.pods, client) || client.IsLoopback() || slices.Contains(p.node, client)) {
		return desired.ScopeCluster
	}
	return p.Scope
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
