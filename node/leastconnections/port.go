package leastconnections

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
)

// port is a service port with the policy.
type port struct {
	name    changetracker.ServicePortName
	gone    bool
	cost    int // of a change
	addrs   []netip.AddrPort
	weights []float64 // of addrs, without Overrides
	// set has the Scales of the Overrides. Those of endpoints that are gone have ended.
	set map[netip.AddrPort]uint16
	// scaled means that others change its weights.
	scaled  bool
	decided int // the reading at which its weights were decided
}

func (p *port) sameName(o *port) bool { return p.name == o.name }

// update takes over a service port of the State, which has all Overrides.
func (f *familyRun) update(p *port, of *changetracker.ServicePort) {
	endpoints := f.state.Endpoints(p.name)
	selected := changetracker.Select(of, endpoints, f.state.Node()).All
	p.addrs, p.weights, p.scaled = nil, nil, false
	p.cost = max(1, len(selected)) * frontends(of)
	if len(selected) > maxEndpoints || p.cost > f.options.Changes {
		return
	}
	plain := f.state.Merged(p.name)
	for i := range selected {
		addr := selected[i].Addr
		at, found := slices.BinarySearchFunc(plain, addr, func(e changetracker.Endpoint, addr netip.AddrPort) int { return e.Addr.Compare(addr) })
		if !found {
			p.scaled = true // a hook has added it
			continue
		}
		weight := int(max(plain[at].Weight, 1))
		switch int(max(selected[i].Weight, 1)) {
		case weight * int(max(p.set[addr], 1)):
		case weight:
			delete(p.set, addr) // it ended, because the endpoint was away
		default:
			p.scaled = true
		}
		p.addrs, p.weights = append(p.addrs, addr), append(p.weights, float64(weight))
	}
}

// balanced reports whether the service port does not stay at random.
func (p *port) balanced() bool { return len(p.addrs) > 0 && !p.scaled }

// frontends is how many addresses a service port has.
func frontends(p *changetracker.ServicePort) int {
	return 2 + len(p.ExternalIPs) + len(p.LoadBalancerVIPs) //nolint:mnd // the ClusterIP and the node port
}

// wanted returns the Scales that the endpoints should have; nil for none.
func (p *port) wanted(counts map[endpointKey]*count, reading int) []uint16 {
	if !p.balanced() {
		return nil
	}
	loads, fresh := make([]load, len(p.addrs)), 0
	for i, addr := range p.addrs {
		c := counts[endpointKey{p.name.Protocol, addr}]
		loads[i] = load{p.weights[i], c.open}
		fresh += c.fresh
	}
	return scales(loads, fresh*max(1, reading-p.decided), len(p.set) > 0) // the next decision is as far away as the last
}

// scales returns the Scales that the endpoints have; nil for none.
func (p *port) scales() []uint16 {
	if len(p.set) == 0 {
		return nil
	}
	all := make([]uint16, len(p.addrs))
	for i, addr := range p.addrs {
		all[i] = max(1, p.set[addr])
	}
	return all
}

// override replaces the Overrides of a service port.
func (f *familyRun) override(p *port, wanted []uint16) {
	next := make(map[netip.AddrPort]uint16, len(wanted))
	for i, scale := range wanted {
		next[p.addrs[i]] = scale
		f.tell(p, p.addrs[i], scale)
	}
	for addr := range p.set {
		if _, has := next[addr]; !has {
			f.tell(p, addr, 0)
		}
	}
	p.set = next
}

// owner names the Balancer in Overrides.
const owner = "leastconnections"

// tell overrides one endpoint.
func (f *familyRun) tell(p *port, addr netip.AddrPort, scale uint16) {
	if f.source.Tracker().Override(p.name, addr, changetracker.Override{By: owner, Scale: scale}) {
		f.changed = true
		f.note(func(now *Readings) { now.Changes++ })
	}
}
