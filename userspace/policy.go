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

// verdict returns whether a client is served, and by which endpoints. The zero scope with
// action Drop means that the source ranges exclude the client.
func (p *policy) verdict(client netip.Addr) (scope desired.Scope, action desired.Action) {
	if p.restricted && !contains(p.ranges, client) {
		return 0, desired.Drop
	}
	if p.shortCircuit && (contains(p.pods, client) || client.IsLoopback() || slices.Contains(p.node, client)) {
		return desired.ScopeCluster, desired.Forward
	}
	return p.scope, p.action
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
