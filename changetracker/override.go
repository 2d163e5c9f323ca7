package changetracker

import (
	"cmp"
	"net/netip"
	"slices"
)

// Override changes an endpoint beyond what slices say: for a health checker of its own, or for
// an operator. The zero value changes nothing.
type Override struct {
	// Eject stops new connections, as if the endpoint had failed its readiness probe: it stays
	// in the State, but is neither Ready nor Serving. If that would leave the service port no ready
	// endpoint although one is ready, or none that is usable, none of its endpoints is ejected: connections
	// must not come back to endpoints that terminate. With a traffic policy Local, the same holds for the endpoints of
	// a node on which one terminates, in the group that serves.
	Eject bool
	// Maintenance sets Endpoint.Maintenance, also if no endpoint is left for new connections.
	Maintenance bool
	// Weight replaces Endpoint.Weight. 0 does not change it.
	Weight uint16
}

// overrides are those of one service port.
type overrides map[netip.AddrPort]Override

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
	list = slices.Clone(list)
	for i := range list {
		e := &list[i]
		own := o[e.Addr]
		e.Weight, e.Maintenance = cmp.Or(own.Weight, e.Weight), e.Maintenance || own.Maintenance
		e.tidy()
		on := place{e.Node, e.Priority}
		if places[on] == nil {
			places[on] = &best{}
		}
		all.add(e, !own.Eject)
		places[on].add(e, !own.Eject)
		then := *e
		if own.Eject {
			then.Ready, then.Serving = false, false
		}
		after.count(&then, &Node{}, 1)
	}
	serving := after.serving(p.Failover).priority
	for i := range list {
		e := &list[i]
		on := places[place{e.Node, e.Priority}]
		if o[e.Addr].Eject && all.stays() && (!p.UsesLocalEndpoints() || e.Priority != serving || !on.drains || on.stays()) {
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
