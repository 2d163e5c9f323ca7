package changetracker

import (
	"math"
	"net/netip"
	"slices"
)

// Override changes an endpoint beyond what slices say: for a health checker of its own, or for
// an operator. It changes nothing if all but By is zero.
type Override struct {
	// By names the part of the program that overrides. Several parts may override one endpoint: it is ejected, or in
	// maintenance, if one of them says so, and all Scales multiply its weight.
	By string
	// Eject stops new connections, as if the endpoint had failed its readiness probe: it stays
	// in the State, but is neither Ready nor Serving. If that would leave the service port no ready
	// endpoint although one is ready, or none that is usable, none of its endpoints is ejected: connections
	// must not come back to endpoints that terminate. With a traffic policy Local, the same holds for the endpoints of
	// a node on which one terminates, in the group that serves.
	Eject bool
	// Maintenance sets Endpoint.Maintenance, also if no endpoint is left for new connections.
	Maintenance bool
	// Scale multiplies the endpoint's share of new connections, which is Endpoint.Weight. 0 does not change it.
	// If a weight becomes more than 65535, all weights of the service port are divided.
	Scale uint16
}

// overrides are those of one service port, by endpoint; an endpoint has one of each By.
type overrides map[netip.AddrPort][]Override

// replace replaces the Override with the same By, and reports whether that was another one.
func (o overrides) replace(addr netip.AddrPort, with Override) (changed bool) {
	list := o[addr]
	i := slices.IndexFunc(list, func(other Override) bool { return other.By == with.By })
	isNone := with == Override{By: with.By}
	switch {
	case i < 0 && isNone, i >= 0 && list[i] == with:
		return false
	case i < 0:
		o[addr] = append(list, with)
	case !isNone:
		list[i] = with
	case len(list) == 1:
		delete(o, addr)
	default:
		o[addr] = slices.Delete(list, i, i+1)
	}
	return true
}

// sum is what the Overrides of an endpoint come to.
type sum struct {
	eject, maintenance bool
	scale              uint64 // below 2^32
}

func (o overrides) sum(addr netip.AddrPort) sum {
	all := sum{scale: 1}
	for _, own := range o[addr] {
		all.eject, all.maintenance = all.eject || own.Eject, all.maintenance || own.Maintenance
		all.scale = min(all.scale*uint64(max(own.Scale, 1)), math.MaxUint32)
	}
	return all
}

// apply returns the list itself if it changes nothing, and otherwise a changed copy. p may be nil.
func (o overrides) apply(list []Endpoint, p *ServicePort) []Endpoint {
	if len(o) == 0 {
		return list
	}
	if p == nil {
		p = &ServicePort{}
	}
	var all best
	places := map[place]*best{}
	var after summary // of all ejections
	list, sums := slices.Clone(list), make([]sum, len(list))
	most := uint64(math.MaxUint16)
	for i := range list {
		sums[i] = o.sum(list[i].Addr)
		most = max(most, sums[i].scale*uint64(list[i].share()))
	}
	for i := range list {
		e, own := &list[i], &sums[i]
		e.Weight = uint16(max(1, own.scale*uint64(e.share())*math.MaxUint16/most)) //nolint:gosec // most is at least as much
		e.Maintenance = e.Maintenance || own.maintenance
		e.tidy()
		on := place{e.Node, e.Priority}
		if places[on] == nil {
			places[on] = &best{}
		}
		all.add(e, !own.eject)
		places[on].add(e, !own.eject)
		then := *e
		if own.eject {
			then.Ready, then.Serving = false, false
		}
		after.count(&then, &Node{}, 1)
	}
	serving := after.serving(p.Failover).priority
	for i := range list {
		e := &list[i]
		on := places[place{e.Node, e.Priority}]
		if sums[i].eject && all.stays() && (!p.UsesLocalEndpoints() || e.Priority != serving || !on.drains || on.stays()) {
			e.Ready, e.Serving, e.Ejected = false, false, e.Usable()
		}
	}
	return list
}

// place is where the endpoints are that a traffic policy Local takes.
type place struct {
	node  string
	group uint8
}

// best is whether the best of some endpoints would stay if all that should be are ejected: a ready one if there is
// one, otherwise one that serves while it terminates.
type best struct{ ready, drains, keptReady, keptUsable bool }

func (b *best) add(e *Endpoint, kept bool) {
	b.ready, b.drains = b.ready || e.Ready, b.drains || e.draining()
	b.keptReady, b.keptUsable = b.keptReady || kept && e.Ready, b.keptUsable || kept && e.Usable()
}

func (b *best) stays() bool { return b.keptReady || !b.ready && b.keptUsable }
