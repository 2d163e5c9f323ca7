package desired

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// selection is Select for the Resolver's Node, followed by EditSelection.
func (r *Resolver) selection(state *changetracker.State, p *changetracker.ServicePort, endpoints []changetracker.Endpoint) changetracker.Selection {
	s := changetracker.Select(p, endpoints, r.Node)
	if r.EditSelection == nil {
		return s
	}
	s = r.EditSelection(state.For(r.Node), p, s)
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

// serving returns the endpoints that existing flows may continue with: all that serve, and
// those that a hook has added.
func (r *Resolver) serving(s *Service, endpoints, selected []changetracker.Endpoint) []netip.AddrPort {
	if r.EditSelection == nil && len(s.Cluster) == len(endpoints) && allServe(endpoints) {
		return s.Cluster // the usual case
	}
	list := Serving(endpoints)
	if r.EditSelection == nil {
		return list
	}
	list = append(list, addresses(selected)...)
	slices.SortFunc(list, netip.AddrPort.Compare)
	return slices.Compact(list)
}

func allServe(endpoints []changetracker.Endpoint) bool {
	return !slices.ContainsFunc(endpoints, func(e changetracker.Endpoint) bool { return !e.Serving && !e.Ready })
}

func addresses(endpoints []changetracker.Endpoint) []netip.AddrPort {
	if len(endpoints) == 0 {
		return nil
	}
	list := make([]netip.AddrPort, len(endpoints))
	for i := range endpoints {
		list[i] = endpoints[i].Addr
	}
	return list
}

// weights returns nil if all endpoints have the same weight.
func weights(endpoints []changetracker.Endpoint) []uint16 {
	differs := func(e changetracker.Endpoint) bool { return share(&e) != share(&endpoints[0]) }
	if !slices.ContainsFunc(endpoints, differs) {
		return nil
	}
	list := make([]uint16, len(endpoints))
	for i := range endpoints {
		list[i] = share(&endpoints[i])
	}
	return list
}

// share is the effective weight: 0 means 1.
func share(e *changetracker.Endpoint) uint16 { return max(e.Weight, 1) }
