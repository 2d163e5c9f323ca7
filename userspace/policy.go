package userspace

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// policy decides which clients a socket serves, and by which endpoints.
type policy struct {
	scope  desired.Scope
	action desired.Action
	// shortCircuit gives all endpoints to pods and to the node itself.
	shortCircuit bool
	restricted   bool
	ranges       []netip.Prefix
	pods         []netip.Prefix
	node         []netip.Addr
}

// policyOf returns the policy for a frontend's clients.
func policyOf(f *desired.Frontend, g *desired.Globals) policy {
	return policy{
		scope: f.Scope, action: f.Action, shortCircuit: f.ShortCircuit,
		restricted: f.Restricted, ranges: f.SourceRanges, pods: g.PodCIDRs, node: g.NodeAddresses,
	}
}

// admit returns by which endpoints a client is served; 0 means that the source ranges exclude it.
func (p *policy) admit(client netip.Addr) desired.Scope {
	if p.restricted && !contains(p.ranges, client) {
		return 0
	}
	if p.shortCircuit && (contains(p.pods, client) || client.IsLoopback() || slices.Contains(p.node, client)) {
		return desired.ScopeCluster
	}
	return p.scope
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
