package oracle

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// Packet is the first packet of a connection.
type Packet struct {
	Protocol    desired.Protocol
	Source      netip.AddrPort
	Destination netip.AddrPort
	FromNode    bool // a process of the node sends it
}

// Outcome is what may become of a packet: "forward", "reject", "drop", or "pass" if it is
// not for a Service.
type Outcome struct {
	Verdict    string
	Endpoint   netip.AddrPort // of "forward"
	Masquerade bool
}

// Verdicts decides about packets.
type Verdicts struct {
	// ServiceIPsPass is for engines with this trait: ClusterIPs refuse nothing.
	ServiceIPsPass bool
	// LoopbackNodePorts is for engines with this trait: the node's own processes reach node
	// ports at 127.0.0.0/8 too, if the addresses of node ports include it.
	LoopbackNodePorts bool
	// LocalPolicyBindsAll is for engines with this trait: under policy Local, pods and the node
	// get local endpoints too, if there are any.
	LocalPolicyBindsAll bool
	// VIPsAreLocal is for engines with this trait: other ports of all VIPs reject, and health check
	// node ports are answered there.
	VIPsAreLocal bool

	oracle    *oracle
	decisions map[changetracker.ServicePortName]Decision
}

// NewVerdicts prepares for the packets of a family.
func NewVerdicts(c *Cluster, family v1.IPFamily) *Verdicts {
	o := newOracle(c, family)
	return &Verdicts{oracle: o, decisions: o.decideAll()}
}

// Of returns all that may become of a packet, sorted. Each way of a random choice is one.
func (f *Verdicts) Of(p Packet) []Outcome {
	name, key, ok := f.frontendOf(p)
	if !ok {
		return []Outcome{{Verdict: f.unserved(p)}}
	}
	d := f.decisions[name]
	i := slices.IndexFunc(d.Frontends, func(o Frontend) bool { return o.Key == key })
	return f.served(p, &d, &d.Frontends[i])
}

// frontendOf: a VIP wins over a node port, unless the node port's Service is older (PKT-34,
// PKT-38). A node port is accepted at the node's addresses (PKT-30, PKT-31).
func (f *Verdicts) frontendOf(p Packet) (name changetracker.ServicePortName, key desired.Key, ok bool) {
	key = desired.Key{VIP: p.Destination.Addr(), Protocol: p.Protocol, Port: p.Destination.Port()}
	owner, ok := f.oracle.owners[key]
	if !ok && (f.oracle.acceptsNodePorts(key.VIP) || f.atLoopback(p)) {
		owner, ok = f.oracle.owners[desired.Key{Protocol: key.Protocol, Port: key.Port}]
	}
	if !ok {
		return name, key, false
	}
	return owner.name, owner.key, true
}

// atLoopback: other hosts reach no node port at loopback addresses (PKT-32).
func (f *Verdicts) atLoopback(p Packet) bool {
	to := p.Destination.Addr()
	return f.LoopbackNodePorts && p.FromNode && to.Is4() && to.IsLoopback() && within(f.oracle.NodePortAddresses, to)
}

// unserved: other ports of a ClusterIP reject (PKT-10), addresses without a Service in the
// ranges of Services drop (PKT-11), and the node keeps its own addresses (PKT-14).
func (f *Verdicts) unserved(p Packet) string {
	a := p.Destination.Addr()
	isVIP := func(c claim) bool { return c.key.VIP == a }
	isClusterIP := func(c claim) bool {
		return c.key.VIP == a && slices.ContainsFunc(f.oracle.ports, func(p *servicePort) bool {
			return p.name == c.name && p.clusterIP == a
		})
	}
	owners := slices.Collect(maps.Values(f.oracle.owners))
	switch {
	case f.ServiceIPsPass, f.IsLocal(a):
		return "pass"
	case f.VIPsAreLocal && slices.ContainsFunc(owners, isVIP):
		if p.Protocol == 6 && f.oracle.hasHealthCheck(p.Destination.Port()) {
			return "pass"
		}
		return "reject"
	case slices.ContainsFunc(owners, isClusterIP):
		return "reject"
	case within(f.oracle.ServiceCIDRs, a):
		return "drop"
	default:
		return "pass"
	}
}

// IsLocal reports whether an address is the node's.
func (f *Verdicts) IsLocal(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(f.oracle.Node.Addresses, a)
}

// served: source ranges come first (PKT-47). Policy Local does not bind pods and the node
// (PKT-23, PKT-25).
func (f *Verdicts) served(p Packet, d *Decision, at *Frontend) []Outcome {
	from := p.Source.Addr()
	fromNode := p.FromNode || f.IsLocal(from)
	fromPod := f.oracle.DetectsPods && within(f.oracle.Node.PodCIDRs, from)
	if at.Restricted && !within(at.Ranges, from) {
		return []Outcome{{Verdict: "drop"}}
	}
	endpoints, masquerade := d.Cluster, at.Masquerade == "all" || at.Masquerade == "non-pod" && !fromPod
	switch {
	case at.ShortCircuit && (fromPod || fromNode):
		masquerade, endpoints = !fromPod, f.unbound(d)
	case at.Action != "forward":
		return []Outcome{{Verdict: at.Action}}
	case at.Scope == "Local":
		endpoints = d.Local
	}
	var all []Outcome
	for _, e := range endpoints {
		hairpin := e.Addr() == from && slices.Contains(d.OnNode, from) // PKT-02
		all = append(all, Outcome{Verdict: "forward", Endpoint: e, Masquerade: masquerade || hairpin})
	}
	return Sorted(all)
}

// unbound are the endpoints for those whom policy Local does not bind.
func (f *Verdicts) unbound(d *Decision) []netip.AddrPort {
	if f.LocalPolicyBindsAll && len(d.Local) > 0 {
		return d.Local
	}
	return d.Cluster
}

// Sorted orders outcomes, and removes those that are there twice.
func Sorted(all []Outcome) []Outcome {
	slices.SortFunc(all, func(a, b Outcome) int {
		return cmp.Or(cmp.Compare(a.Verdict, b.Verdict), a.Endpoint.Compare(b.Endpoint))
	})
	return slices.Compact(all)
}

// IsServed reports whether a destination is a frontend.
func (f *Verdicts) IsServed(protocol desired.Protocol, to netip.AddrPort) bool {
	_, _, ok := f.frontendOf(Packet{Protocol: protocol, Destination: to})
	return ok
}
