package flows

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// Judge decides which flows are stale. It is immutable.
type Judge struct {
	frontends map[desired.Key]*desired.Flows
	begun     map[desired.Key]*desired.Flows // those of check.Untranslated
	ends      map[desired.Key]*desired.Flows // those of check.End
	check     desired.FlowCheck
	node      map[netip.Addr]bool
}

// NewJudge returns a Judge for one family. nodeAddrs are all addresses of the node. Only
// these accept node ports; flows to node ports of other nodes may also pass through this
// one.
func NewJudge(check desired.FlowCheck, nodeAddrs []netip.Addr) *Judge {
	j := &Judge{
		frontends: byKey(check.Frontends),
		begun:     byKey(check.Untranslated),
		ends:      byKey(check.End),
		check:     check,
		node:      make(map[netip.Addr]bool, len(nodeAddrs)),
	}
	for _, addr := range nodeAddrs {
		j.node[addr] = true
	}
	return j
}

func byKey(all []desired.Flows) map[desired.Key]*desired.Flows {
	found := make(map[desired.Key]*desired.Flows, len(all))
	for i := range all {
		found[all[i].Key] = &all[i]
	}
	return found
}

// Stale reports whether a flow must be deleted.
func (j *Judge) Stale(f Flow) bool {
	if flows := j.find(j.frontends, &f); flows != nil {
		return stale(flows, &f)
	}
	if flows := j.find(j.begun, &f); flows != nil {
		return !f.Answered && !f.Translated() && stale(flows, &f) || ended(flows, &f)
	}
	return f.Translated() && within(j.check.ServiceCIDRs, f.Dialled.Addr())
}

// Ended reports whether an earlier process served a connection, whatever its state is.
func (j *Judge) Ended(f Flow) bool {
	flows := j.find(j.begun, &f)
	return flows != nil && ended(flows, &f)
}

// Ends reports whether a connection must end because its endpoint is gone for good.
func (j *Judge) Ends(f Flow) bool {
	if len(j.ends) == 0 || f.Protocol != desired.TCP || !f.Translated() {
		return false
	}
	flows := j.find(j.ends, &f)
	return flows != nil && stale(flows, &f)
}

// find returns the frontend that a flow belongs to, or nil.
func (j *Judge) find(frontends map[desired.Key]*desired.Flows, f *Flow) *desired.Flows {
	key := desired.Key{VIP: f.Dialled.Addr(), Protocol: f.Protocol, Port: f.Dialled.Port()}
	if flows, ok := frontends[key]; ok {
		return flows
	}
	if !j.AcceptsNodePorts(key.VIP) {
		return nil
	}
	key.VIP = netip.Addr{}
	return frontends[key]
}

// AcceptsNodePorts reports whether an address accepts node ports. All of 127.0.0.0/8
// belongs to the node, including addresses that the interface lo does not list. The kernel
// cannot translate packets to ::1.
func (j *Judge) AcceptsNodePorts(addr netip.Addr) bool {
	accepts := j.node[addr]
	if addr.IsLoopback() {
		accepts = addr.Is4() && j.check.LoopbackNodePorts
	}
	return accepts && within(j.check.NodePortAddresses, addr)
}

func within(prefixes []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(addr) })
}
