package conntrack

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// Judge says which flows are stale. It is not changed by use.
type Judge struct {
	frontends map[desired.Key]*desired.Flows
	check     desired.FlowCheck
	node      map[netip.Addr]bool
}

// NewJudge returns a Judge of one family. nodeAddrs are all addresses of the node:
// only those accept node ports, not those of other nodes, which flows may go
// through here too.
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

// Stale says whether a flow must be deleted.
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

// acceptsNodePorts says whether node ports may be dialled at an address. All of
// 127.0.0.0/8 is the node's, also addresses that its interface lo does not list; packets
// to ::1 cannot be translated.
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
