package proxier

import (
	"iter"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// Sending is what a node knows of an endpoint, and why it may send new connections to it, or datagrams.
type Sending struct {
	Endpoint netip.AddrPort
	// Service is the service port that has the endpoint; the zero name if Reason has nothing to do with one.
	Service changetracker.ServicePortName
	// Frontends are those whose new connections may get the endpoint, in order.
	Frontends []desired.Key
	// Ready says that the service port is programmed with the endpoint as a ready one: a frontend that does
	// not send to it leaves it to other nodes, by its traffic policy or topology hints.
	Ready bool
	// FlowsOnly says that new connections do not get it, but that existing flows of UDP may go on, as
	// long as their clients send and the endpoint serves.
	FlowsOnly bool
	// Reason says more; empty if the endpoint is one of those that the EndpointSlices want here.
	Reason string
}

// leaving has the endpoints that some frontend sends to, although the EndpointSlices do not have
// them as ready: they end, and there is no better one. family.mu guards it.
type leaving map[changetracker.ServicePortName]*desired.Service

// update takes over what became of service ports.
func (l leaving) update(outcomes []desired.Applied, state *changetracker.State, edited bool) {
	for i := range outcomes {
		o := &outcomes[i]
		// Only a failure or a hook may mix ready endpoints and those that end.
		if o.Is != nil && (o.Is.Terminating || (edited || o.Failed) && len(unready(o.Is, state)) > 0) {
			l[o.Name] = o.Is
		} else if len(l) > 0 {
			delete(l, o.Name)
		}
	}
}

// unready returns the endpoints of both scopes that are not ready, sorted.
func unready(s *desired.Service, state *changetracker.State) (all []netip.AddrPort) {
	for _, scope := range []desired.Endpoints{s.Cluster, s.Local} {
		for addr := range scope.All() {
			if e, listed := state.Endpoint(s.Name, addr); !listed || !e.Ready {
				all = append(all, addr)
			}
		}
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	return slices.Compact(all)
}

// Sends returns what the node knows of some endpoints, and why it may send new connections to them: of
// these, of which port 0 stands for all ports, and of all to which it sends although the EndpointSlices
// do not have them as ready. It is about what is programmed, without pending changes: read Status first,
// and what it says is in the answer. Sorted by endpoint and service port. The first question about an
// address looks at all endpoints, unless Config.Tracker.IndexEndpoints is set; the next one at what has
// changed.
func (p *Proxier) Sends(endpoints ...netip.AddrPort) (all []Sending) {
	for _, f := range p.families {
		var own []netip.AddrPort
		for _, e := range endpoints {
			if e = netip.AddrPortFrom(e.Addr().Unmap(), e.Port()); e.Addr().Is4() == (f.name == v1.IPv4Protocol) {
				own = append(own, e)
			}
		}
		all = append(all, f.sends(own)...)
	}
	slices.SortStableFunc(all, func(a, b Sending) int {
		if c := a.Endpoint.Compare(b.Endpoint); c != 0 {
			return c
		}
		return a.Service.Compare(b.Service)
	})
	return all
}

func (f *family) sends(endpoints []netip.AddrPort) (all []Sending) {
	var now programmed
	had := map[changetracker.ServicePortName]*port{} // those that failed
	var left []*desired.Service
	f.locked(func() {
		now = f.programmed
		for name, r := range f.ports.byName {
			if r.failed != nil {
				had[name] = &port{has: r.has, failed: r.failed}
			}
		}
		for _, s := range f.leaving {
			left = append(left, s)
		}
	})
	if now.state == nil {
		return nil
	}
	for _, s := range left {
		for _, addr := range unready(s, now.state) {
			if !slices.ContainsFunc(endpoints, func(asked netip.AddrPort) bool { return covers(asked, addr) }) {
				all = append(all, sending(s, addr, now.state, had[s.Name])...)
			}
		}
	}
	find := f.namesOf(&now, endpoints)
	for _, asked := range endpoints {
		all = append(all, f.sendsTo(asked, &now, had, find(asked.Addr()))...)
	}
	return all
}

// namesOf returns how to find the service ports that may send to the addresses of endpoints.
func (f *family) namesOf(now *programmed, endpoints []netip.AddrPort) func(netip.Addr) iter.Seq[changetracker.ServicePortName] {
	switch {
	case f.config.EditSelection != nil: // it may add endpoints
		return func(netip.Addr) iter.Seq[changetracker.ServicePortName] {
			return func(yield func(changetracker.ServicePortName) bool) {
				for name := range now.state.All() {
					if !yield(name) {
						return
					}
				}
			}
		}
	case f.config.Tracker.IndexEndpoints:
		return now.state.ByEndpoint
	default:
		addrs := make([]netip.Addr, 0, len(endpoints))
		for _, asked := range endpoints {
			addrs = append(addrs, asked.Addr())
		}
		found := f.lookups.find(now.state, addrs)
		return func(addr netip.Addr) iter.Seq[changetracker.ServicePortName] { return slices.Values(found[addr]) }
	}
}

// covers reports whether an endpoint is asked for.
func covers(asked, endpoint netip.AddrPort) bool {
	return asked.Addr() == endpoint.Addr() && (asked.Port() == 0 || asked.Port() == endpoint.Port())
}

// sendsTo returns why the node may send to an endpoint.
func (f *family) sendsTo(asked netip.AddrPort, now *programmed, had map[changetracker.ServicePortName]*port, names iter.Seq[changetracker.ServicePortName]) (all []Sending) {
	add := func(s *desired.Service, failed *port) {
		if s == nil {
			return
		}
		for addr := range s.Serving.At(asked.Addr()) { // has all of both scopes
			if covers(asked, addr) {
				all = append(all, sending(s, addr, now.state, failed)...)
			}
		}
	}
	for _, failed := range had {
		add(failed.has, failed)
	}
	for name := range names {
		if had[name] == nil {
			s, _ := now.resolved.Service(name)
			add(s, nil)
			all = append(all, standby(s, asked, now.state)...)
		}
	}
	if f.can.Lingers != nil {
		if why := f.can.Lingers(asked); why != "" {
			all = append(all, Sending{Endpoint: asked, Reason: why})
		}
	}
	return all
}

// standby returns the ready endpoints that are not among those that serve because of Failover.End.
func standby(s *desired.Service, asked netip.AddrPort, state *changetracker.State) (all []Sending) {
	if s == nil || !s.Port.Failover.End {
		return nil
	}
	state.EachEndpoint(s.Name, func(e *changetracker.Endpoint) {
		if e.Ready && covers(asked, e.Addr) && !s.Serving.Has(e.Addr) {
			all = append(all, sending(s, e.Addr, state, nil)...)
		}
	})
	return all
}

// sending returns what a service port has to do with an endpoint that serves; nothing if it does not send to it.
func sending(s *desired.Service, addr netip.AddrPort, state *changetracker.State, failed *port) []Sending {
	is := Sending{Endpoint: addr, Service: s.Name, Frontends: s.Sends(addr)}
	if listed, ok := state.Endpoint(s.Name, addr); ok && failed == nil {
		is.Ready = listed.Ready
	}
	switch {
	case len(is.Frontends) > 0 || is.Ready:
	case s.Protocol == desired.UDP:
		is.FlowsOnly = true
	default:
		return nil
	}
	if failed != nil {
		is.Reason = "not programmed, the kernel has an older version: " + failed.failed.Err.Error()
	}
	return []Sending{is}
}
