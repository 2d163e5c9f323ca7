package userspace

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// treatment is what a socket does with clients.
type treatment struct {
	scope  desired.Scope
	action desired.Action
	// shortCircuit gives pods, and the node itself, all endpoints.
	shortCircuit bool
	restricted   bool
	ranges       []netip.Prefix
	pods         []netip.Prefix
	node         []netip.Addr
}

// treatmentOf is what a frontend's clients get.
func treatmentOf(f *desired.Frontend, g *desired.Globals) treatment {
	return treatment{
		scope: f.Scope, action: f.Action, shortCircuit: f.ShortCircuit,
		restricted: f.Restricted, ranges: f.SourceRanges, pods: g.PodCIDRs, node: g.NodeAddresses,
	}
}

// verdict says whether a client is served, and by which endpoints. A client that is
// not admitted is dropped, as far as a socket can.
func (t *treatment) verdict(client netip.Addr) (scope desired.Scope, action desired.Action) {
	if t.restricted && !contains(t.ranges, client) {
		return 0, desired.Drop
	}
	if t.shortCircuit && (contains(t.pods, client) || client.IsLoopback() || slices.Contains(t.node, client)) {
		return desired.ScopeCluster, desired.Forward
	}
	return t.scope, t.action
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
