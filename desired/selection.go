package desired

import (
	"cmp"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/sorted"
)

// selected is a service port with its endpoints, and what they were made from, so that the next version
// is made from those that have changed.
type selected struct {
	service *Service
	choice  changetracker.Choice
	here    Endpoints // of whose addresses OnNode is
}

// continues reports whether the lists of an earlier version differ only by endpoints that changed.
func (t *selected) continues(since *selected) bool {
	if since.service == nil {
		return false
	}
	p, was := t.service.Port, since.service.Port
	return t.choice.SameRules(&since.choice) && t.service.EndsConnections() == since.service.EndsConnections() && p.KeepFlows == was.KeepFlows &&
		p.UsesClusterEndpoints() == was.UsesClusterEndpoints() && p.UsesLocalEndpoints() == was.UsesLocalEndpoints()
}

// setEndpoints sets the endpoints of a Service. since is an earlier version for this service port by this
// Resolver, or empty: it costs what has changed since then.
func (r *Resolver) setEndpoints(s *Service, state *changetracker.State, since selected) selected {
	t := selected{service: s}
	t.choice, _ = state.For(r.Node).Choose(s.Name, &since.choice)
	was, choice := &Service{}, &t.choice
	if t.continues(&since) {
		was = since.service
	} else {
		since = selected{}
	}
	all, cluster, local := choice.Len()
	clusterEnds, localEnds := choice.Terminating()
	var lists [listCount]list
	if s.Port.UsesClusterEndpoints() {
		lists[clusterList] = list{wanted: true, was: was.Cluster, size: cluster}
		s.ClusterWeights, s.Terminating = weights(choice, choice.Cluster), clusterEnds
	}
	if s.Port.UsesLocalEndpoints() {
		lists[localList] = list{wanted: true, was: was.Local, size: local}
		s.LocalWeights, s.Terminating = weights(choice, choice.Local), s.Terminating || localEnds
	}
	servingIsCluster := s.Port.UsesClusterEndpoints() && cluster == all
	lists[servingList] = list{wanted: !servingIsCluster, was: was.Serving, size: all}
	lists[listedList] = list{wanted: s.EndsConnections(), was: was.Listed, size: all}
	lists[hereList] = list{wanted: true, was: since.here}
	r.follow(s.Port, &since.choice, choice, &lists)
	s.Cluster, s.Local, s.Serving, s.Listed = lists[clusterList].now, lists[localList].now, lists[servingList].now, lists[listedList].now
	if servingIsCluster {
		s.Serving = s.Cluster
	}
	t.here = lists[hereList].now
	if s.OnNode = was.OnNode; !t.here.list.Same(&since.here.list) {
		s.OnNode = t.here.hosts()
	}
	return t
}

// The lists of a service port's endpoints.
const (
	clusterList = iota
	localList
	servingList
	listedList
	hereList // of whose addresses OnNode is
	listCount
)

// list is a list of some endpoints of a Choice.
type list struct {
	wanted   bool
	was, now Endpoints                     // for an earlier Choice, for this one
	size     int                           // of a new one
	first    []netip.AddrPort              // if was is empty
	edits    []sorted.Edit[netip.AddrPort] // otherwise
}

// follow sets lists for a Choice from the lists for an earlier one.
func (r *Resolver) follow(p *changetracker.ServicePort, since, choice *changetracker.Choice, lists *[listCount]list) {
	choice.Changes(since, func(before, after *changetracker.Endpoint) {
		for which := range lists {
			was := before != nil && r.belongs(p, choice, lists, which, before)
			if is := after != nil && r.belongs(p, choice, lists, which, after); was != is {
				lists[which].edit(cmp.Or(before, after).Addr, was)
			}
		}
	})
	for which := range lists {
		if l := &lists[which]; l.was.Len() > 0 {
			l.now = Endpoints{l.was.list.With(l.edits, compareAddrs)}
		} else {
			l.now = endpointsOf(l.first)
		}
	}
}

// belongs reports whether an endpoint belongs into a list.
func (r *Resolver) belongs(p *changetracker.ServicePort, choice *changetracker.Choice, lists *[listCount]list, which int, e *changetracker.Endpoint) bool {
	if !lists[which].wanted {
		return false
	}
	switch which {
	case clusterList:
		return choice.Cluster(e)
	case localList:
		return choice.Local(e)
	case servingList:
		return holds(p, e) && !choice.Ends(e)
	case listedList:
		return !choice.Ends(e)
	case hereList:
		return r.mayBeHere(e) && (r.belongs(p, choice, lists, clusterList, e) || r.belongs(p, choice, lists, localList, e))
	}
	return true
}

func (l *list) edit(addr netip.AddrPort, remove bool) {
	if l.was.Len() > 0 {
		l.edits = append(l.edits, sorted.Edit[netip.AddrPort]{Item: addr, Remove: remove})
		return
	}
	if l.first == nil {
		l.first = make([]netip.AddrPort, 0, l.size)
	}
	l.first = append(l.first, addr)
}

// hosts returns the addresses without ports, each once.
func (e Endpoints) hosts() (hosts []netip.Addr) {
	for addr := range e.list.All {
		if last := len(hosts) - 1; last < 0 || hosts[last] != addr.Addr() {
			hosts = append(hosts, addr.Addr())
		}
	}
	return hosts
}

// weights returns the weights of the endpoints that has selects; nil if all are equal.
func weights(choice *changetracker.Choice, has func(*changetracker.Endpoint) bool) (list []uint16) {
	if !choice.Weighted() {
		return nil
	}
	choice.Changes(&changetracker.Choice{}, func(_, e *changetracker.Endpoint) {
		if has(e) {
			list = append(list, share(e))
		}
	})
	return unlessEqual(list)
}

func unlessEqual(weights []uint16) []uint16 {
	if !slices.ContainsFunc(weights, func(w uint16) bool { return w != weights[0] }) {
		return nil
	}
	return weights
}

// takeEdited is take with EditSelection.
func (r *Resolver) takeEdited(s *Service, state *changetracker.State) (anyEndpoint bool) {
	endpoints := state.Endpoints(s.Name)
	selection := r.edited(state, s.Port, endpoints)
	choice, _ := state.For(r.Node).Choose(s.Name, nil)
	selected, _ := scopeOf(selection.All) // a hook may have added some, also of a group that does not serve
	endpoints = slices.DeleteFunc(slices.Clone(endpoints), func(e changetracker.Endpoint) bool { return choice.Ends(&e) && !selected.Has(e.Addr) })
	var here []netip.AddrPort
	for i := range selection.All {
		if e := &selection.All[i]; r.mayBeHere(e) {
			here = append(here, e.Addr)
		}
	}
	s.OnNode = endpointsOf(here).hosts()
	if s.Port.UsesClusterEndpoints() {
		s.Cluster, s.ClusterWeights = scopeOf(selection.Cluster)
		s.Terminating = slices.ContainsFunc(selection.Cluster, unready)
	}
	if s.Port.UsesLocalEndpoints() {
		s.Local, s.LocalWeights = scopeOf(selection.Local)
		s.Terminating = s.Terminating || slices.ContainsFunc(selection.Local, unready)
	}
	holding, _ := scopeOf(slices.DeleteFunc(slices.Clone(endpoints), func(e changetracker.Endpoint) bool { return !holds(s.Port, &e) }))
	s.Serving = EndpointsOf(append(holding.Slice(), selected.Slice()...)...)
	if s.EndsConnections() {
		s.Listed, _ = scopeOf(endpoints)
	}
	return selection.Any
}

func unready(e changetracker.Endpoint) bool { return !e.Ready }

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

// holds is serves with the wish of a service port.
func holds(p *changetracker.ServicePort, e *changetracker.Endpoint) bool {
	return serves(e) || p.KeepFlows && !e.Terminating && !e.Ejected
}

// scopeOf returns the addresses and weights of endpoints, which are sorted.
func scopeOf(endpoints []changetracker.Endpoint) (Endpoints, []uint16) {
	addrs, weights := make([]netip.AddrPort, len(endpoints)), make([]uint16, len(endpoints))
	for i := range endpoints {
		addrs[i], weights[i] = endpoints[i].Addr, share(&endpoints[i])
	}
	return endpointsOf(addrs), unlessEqual(weights)
}

// share is the effective weight: 0 means 1.
func share(e *changetracker.Endpoint) uint16 { return max(e.Weight, 1) }
