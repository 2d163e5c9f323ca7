package leastconnections

import (
	"math"
	"net/netip"
	"slices"
	"time"

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
	// due is when the State must have the Overrides; zero if it has had them, or if there are none.
	due time.Time
	// rest is until when it stays at random, because Overrides were not programmed; pause is how long the last one was.
	rest  time.Time
	pause time.Duration
	// scaled means that the State has other weights: because others change them, or an Override has ended, or none
	// should be left and the State still has some.
	scaled  bool
	usable  int // endpoints, also if they are too many
	decided int // the reading at which its weights were decided
}

func (p *port) sameName(o *port) bool { return p.name == o.name }

// update takes over a service port of the State.
func (f *familyRun) update(p *port, of *changetracker.ServicePort) {
	endpoints := f.state.Endpoints(p.name)
	selected := changetracker.Select(of, endpoints, f.state.Node()).All
	p.usable, p.addrs, p.weights = len(selected), nil, nil
	p.cost = max(1, len(selected)) * frontends(of)
	if len(selected) > maxEndpoints || p.cost > f.options.Changes {
		return
	}
	plain := f.state.Merged(p.name)
	agrees := true // the State with the Overrides
	for i := range selected {
		addr := selected[i].Addr
		at, found := slices.BinarySearchFunc(plain, addr, func(e changetracker.Endpoint, addr netip.AddrPort) int { return e.Addr.Compare(addr) })
		weight := 1
		if found { // otherwise a hook has added it
			weight = int(max(plain[at].Weight, 1))
		}
		agrees = agrees && found && int(max(selected[i].Weight, 1)) == weight*int(max(p.set[addr], 1))
		if weight*int(finest(len(selected))) > math.MaxUint16 {
			p.addrs, p.weights = nil, nil
			return
		}
		p.addrs, p.weights = append(p.addrs, addr), append(p.weights, float64(weight))
	}
	switch {
	case agrees:
		if !p.due.IsZero() {
			p.pause = 0
		}
		p.scaled, p.due = false, time.Time{}
	case p.due.IsZero():
		p.scaled = true
	}
}

// balanced reports whether the service port does not stay at random.
func (p *port) balanced() bool { return len(p.addrs) > 0 && !p.scaled && !time.Now().Before(p.rest) }

// giveUp begins a rest if Overrides are due.
func (p *port) giveUp() {
	if p.due.IsZero() {
		return
	}
	p.pause = min(max(2*p.pause, shortestRest), longestRest)
	p.rest = time.Now().Add(p.pause)
}

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

// scales returns the Scales that the endpoints have.
func (p *port) scales() []uint16 {
	all := make([]uint16, len(p.addrs))
	for i, addr := range p.addrs {
		all[i] = max(1, p.set[addr])
	}
	return all
}

// changes reports whether the endpoints are to get other Scales; nil stands for none.
func (p *port) changes(wanted []uint16) bool {
	if wanted == nil || len(p.set) == 0 {
		return wanted != nil || len(p.set) > 0
	}
	return !near(wanted, p.scales())
}

// override replaces the Overrides of a service port.
func (f *familyRun) override(p *port, wanted []uint16) {
	before := p.set
	p.set, p.due, p.scaled = make(map[netip.AddrPort]uint16, len(wanted)), time.Time{}, wanted == nil
	if wanted != nil {
		p.due = time.Now().Add(patience)
	}
	for i, scale := range wanted {
		p.set[p.addrs[i]] = scale
	}
	for _, addr := range p.addrs {
		f.tell(p, addr, p.set[addr])
		delete(before, addr)
	}
	for addr := range before {
		f.tell(p, addr, 0)
	}
}

// owner names the Balancer in Overrides.
const owner = "leastconnections"

// tell overrides one endpoint.
func (f *familyRun) tell(p *port, addr netip.AddrPort, scale uint16) {
	if f.source.Tracker().Override(p.name, addr, changetracker.Override{By: owner, Scale: scale}) {
		f.changed = true
		f.note(func(now *Readings) { now.Overrides++ })
	}
}
