package conntrack

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// Judge decides which flows are stale. It is immutable.
type Judge struct {
	frontends map[desired.Key]*desired.Flows
	check     desired.FlowCheck
	node      map[netip.Addr]bool
}

// NewJudge returns a Judge for one family. nodeAddrs are all addresses of the node. Only
// these accept node ports; flows to node ports of other nodes may also pass through this
// one.
func NewJudge(check desired.FlowCheck, nodeAddrs []netip.Addr) *Judge {
	j := &Judge{
		frontends: make(map[desired.Key]*desired.Flows, len(check.Frontends)),
		check:     check,
		node:      make(map[netip.Addr]bool, len(nodeAddrs)),
	}
	for i := range check.Frontends {
		j.frontends[check.Frontends[i].Key] = &check.Frontends[i]
	}
	for _, addr := range nodeAddrs {
		j.node[addr] = true
	}
	return j
}

// Stale reports whether a flow must be deleted.
func (j *Judge) Stale(f desired.Flow) bool {
	key := desired.Key{VIP: f.Dialled.Addr(), Protocol: f.Protocol, Port: f.Dialled.Port()}
	if flows, ok := j.frontends[key]; ok {
		return flows.Stale(&f)
	}
	if j.acceptsNodePorts(key.VIP) {
		key.VIP = netip.Addr{}
		if flows, ok := j.frontends[key]; ok {
			return flows.Stale(&f)
		}
	}
	return f.Translated() && within(j.check.ServiceCIDRs, f.Dialled.Addr())
}

// acceptsNodePorts reports whether an address accepts node ports. All of 127.0.0.0/8
// belongs to the node, including addresses that the interface lo does not list. The kernel
// cannot translate packets to ::1.
func (j *Judge) acceptsNodePorts(addr netip.Addr) bool {
	accepts := j.node[addr]
	if addr.IsLoopback() {
		accepts = addr.Is4() && j.check.LoopbackNodePorts
	}
	return accepts && within(j.check.NodePortAddresses, addr)
}

func within(prefixes []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(addr) })
}
