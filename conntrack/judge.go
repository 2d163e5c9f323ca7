package conntrack

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// Flow is an entry of connection tracking, as far as it matters who serves it.
type Flow struct {
	Protocol desired.Protocol
	// Dialled is the destination of the original direction, Server the source of
	// the reply direction. They are the same if nobody translated the destination.
	Dialled, Server netip.AddrPort
}

// Judge says which flows are stale. It is not changed by use.
type Judge struct {
	frontends map[desired.Key]*desired.Flows
	node      map[netip.Addr]bool
	orphanage []netip.Prefix
}

// NewJudge returns a Judge of one family. nodeAddrs are all addresses of the node:
// only those accept node ports, not those of other nodes, which flows may go
// through here too.
func NewJudge(check desired.FlowCheck, nodeAddrs []netip.Addr) *Judge {
	j := &Judge{
		frontends: make(map[desired.Key]*desired.Flows, len(check.Frontends)),
		node:      map[netip.Addr]bool{},
		orphanage: check.Orphanage,
	}
	for i := range check.Frontends {
		j.frontends[check.Frontends[i].Key] = &check.Frontends[i]
	}
	for _, addr := range nodeAddrs {
		accepts := slices.ContainsFunc(check.NodePortAddresses, func(p netip.Prefix) bool { return p.Contains(addr) })
		if accepts && !addr.IsLoopback() {
			j.node[addr] = true
		}
	}
	return j
}

// Stale says whether a flow must be deleted.
func (j *Judge) Stale(f Flow) bool {
	key := desired.Key{VIP: f.Dialled.Addr(), Protocol: f.Protocol, Port: f.Dialled.Port()}
	if flows, ok := j.frontends[key]; ok {
		return flows.Stale(f.Dialled, f.Server)
	}
	if j.node[key.VIP] {
		key.VIP = netip.Addr{}
		if flows, ok := j.frontends[key]; ok {
			return flows.Stale(f.Dialled, f.Server)
		}
	}
	return f.Dialled != f.Server && slices.ContainsFunc(j.orphanage, func(p netip.Prefix) bool { return p.Contains(f.Dialled.Addr()) })
}
