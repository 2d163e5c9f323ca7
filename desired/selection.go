package desired

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// take sets the endpoints of a Service, from one walk over all, and returns Selection.Any.
func (r *Resolver) take(s *Service, state *changetracker.State) (anyEndpoint bool) {
	choice, _ := state.For(r.Node).Choose(s.Name)
	usesCluster, usesLocal := s.Port.UsesClusterEndpoints(), s.Port.UsesLocalEndpoints()
	var cluster, local scope
	clusterLen, localLen := choice.Len()
	all, serving := 0, 0
	state.EachEndpoint(s.Name, func(e *changetracker.Endpoint) {
		all++
		if serves(e) {
			serving++
		}
		inCluster, inLocal := usesCluster && choice.Cluster(e), usesLocal && choice.Local(e)
		if inCluster {
			cluster.add(e, clusterLen)
		}
		if inLocal {
			local.add(e, localLen)
		}
		if inCluster || inLocal {
			r.onNode(s, e)
		}
	})
	s.Cluster, s.ClusterWeights = cluster.addrs, cluster.weights
	s.Local, s.LocalWeights = local.addrs, local.weights
	if serving == all && len(s.Cluster) == all {
		s.Serving = s.Cluster // the usual case
	} else {
		s.Serving = pick(state, s.Name, serving, serves)
	}
	if s.EndsConnections() {
		s.Listed = pick(state, s.Name, all, func(*changetracker.Endpoint) bool { return true })
	}
	return choice.Any
}

// takeEdited is take with EditSelection.
func (r *Resolver) takeEdited(s *Service, state *changetracker.State) (anyEndpoint bool) {
	endpoints := state.Endpoints(s.Name)
	selection := r.edited(state, s.Port, endpoints)
	for i := range selection.All {
		r.onNode(s, &selection.All[i])
	}
	if s.Port.UsesClusterEndpoints() {
		s.Cluster, s.ClusterWeights = scopeOf(selection.Cluster)
	}
	if s.Port.UsesLocalEndpoints() {
		s.Local, s.LocalWeights = scopeOf(selection.Local)
	}
	selected, _ := scopeOf(selection.All) // a hook may have added some
	s.Serving = append(Serving(endpoints), selected...)
	slices.SortFunc(s.Serving, netip.AddrPort.Compare)
	s.Serving = slices.Compact(s.Serving)
	if s.EndsConnections() {
		s.Listed, _ = scopeOf(endpoints)
	}
	return selection.Any
}

// edited is what EditSelection makes of Select.
func (r *Resolver) edited(state *changetracker.State, p *changetracker.ServicePort, endpoints []changetracker.Endpoint) changetracker.Selection {
	s := r.EditSelection(state.For(r.Node), p, changetracker.Select(p, endpoints, r.Node))
	s.Cluster, s.Local = canonical(p, s.Cluster), canonical(p, s.Local)
	s.Any = s.Any || len(s.Cluster)+len(s.Local) > 0
	switch {
	case !p.UsesLocalEndpoints():
		s.All = s.Cluster
	case !p.UsesClusterEndpoints():
		s.All = s.Local
	default:
		s.All = canonical(p, slices.Concat(s.Cluster, s.Local))
	}
	return s
}

// canonical returns the list if it is sorted by address, without duplicates and invalid
// endpoints, and otherwise a copy that is.
func canonical(p *changetracker.ServicePort, list []changetracker.Endpoint) []changetracker.Endpoint {
	is4 := p.Family == v1.IPv4Protocol
	valid := func(a netip.AddrPort) bool {
		return a.Port() != 0 && a.Addr().IsValid() && !a.Addr().Is4In6() && a.Addr().Is4() == is4 && !a.Addr().IsUnspecified()
	}
	fits := true
	for i := range list {
		fits = fits && valid(list[i].Addr) && (i == 0 || list[i-1].Addr.Compare(list[i].Addr) < 0)
	}
	if fits {
		return list
	}
	list = slices.Clone(list)
	for i := range list {
		list[i].Addr = netip.AddrPortFrom(list[i].Addr.Addr().Unmap(), list[i].Addr.Port())
	}
	list = slices.DeleteFunc(list, func(e changetracker.Endpoint) bool { return !valid(e.Addr) })
	slices.SortStableFunc(list, func(a, b changetracker.Endpoint) int { return a.Addr.Compare(b.Addr) })
	return slices.CompactFunc(list, func(a, b changetracker.Endpoint) bool { return a.Addr == b.Addr })
}

// serves reports whether existing flows to an endpoint may continue.
func serves(e *changetracker.Endpoint) bool { return e.Ready || e.Serving }

// pick returns the addresses of some endpoints, whose number is known; nil for none.
func pick(state *changetracker.State, name changetracker.ServicePortName, size int, is func(*changetracker.Endpoint) bool) (list []netip.AddrPort) {
	if size == 0 {
		return nil
	}
	list = make([]netip.AddrPort, 0, size)
	state.EachEndpoint(name, func(e *changetracker.Endpoint) {
		if is(e) {
			list = append(list, e.Addr)
		}
	})
	return list
}

// scope collects the endpoints of a Scope.
type scope struct {
	addrs   []netip.AddrPort
	weights []uint16 // nil while all are equal
	equal   uint16
}

// add adds the next of so many endpoints.
func (s *scope) add(e *changetracker.Endpoint, size int) {
	if s.addrs == nil {
		s.addrs, s.equal = make([]netip.AddrPort, 0, size), share(e)
	}
	if s.weights == nil && share(e) != s.equal {
		s.weights = slices.Grow(slices.Repeat([]uint16{s.equal}, len(s.addrs)), size-len(s.addrs))
	}
	if s.addrs = append(s.addrs, e.Addr); s.weights != nil {
		s.weights = append(s.weights, share(e))
	}
}

// scopeOf returns the addresses and weights of endpoints.
func scopeOf(endpoints []changetracker.Endpoint) (addrs []netip.AddrPort, weights []uint16) {
	var s scope
	for i := range endpoints {
		s.add(&endpoints[i], len(endpoints))
	}
	return s.addrs, s.weights
}

// share is the effective weight: 0 means 1.
func share(e *changetracker.Endpoint) uint16 { return max(e.Weight, 1) }
