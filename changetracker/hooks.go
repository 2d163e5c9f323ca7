package changetracker

import (
	"fmt"
	"net/netip"
	"slices"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// survives runs an embedder's hook and says whether it returned. A hook that
// panics must not take the node's proxy down with it.
func (s *store) survives(hook string, run func()) (ok bool) { return survives(hook, s.warn, run) }

// survives is store.survives for one who may not hold the lock.
func survives(hook string, warn func(string, ...zap.Field), run func()) (ok bool) {
	defer func() {
		if r := recover(); r != nil {
			warn("hook panicked", zap.String("hook", hook), zap.String("panic", readable(fmt.Sprint(r))))
		}
	}()
	run()
	return true
}

// selects says whether the Service is one for this proxy (CFG-02 for the label).
// A Select that panics has no say.
func (s *store) selects(service *v1.Service) bool {
	name, labelled := service.Labels[LabelServiceProxyName]
	if labelled != (s.options.ServiceProxyName != "") || name != s.options.ServiceProxyName {
		return false
	}
	if s.options.Select == nil {
		return true
	}
	selected := true
	if !s.survives("Select", func() { selected = s.options.Select(service) }) {
		return true
	}
	return selected
}

// decorateService returns p as the hook leaves it, or p itself when the hook
// panics or leaves something that is no valid service port.
func (s *store) decorateService(p *ServicePort, service *v1.Service) *ServicePort {
	if s.options.DecorateService == nil {
		return p
	}
	decorated := p.clone()
	if !s.survives("DecorateService", func() { s.options.DecorateService(decorated, service) }) {
		return p
	}
	decorated.Name, decorated.Family = p.Name, p.Family
	if err := decorated.canonicalise(); err != nil {
		s.warn("hook left an invalid service port", zap.Stringer("service_port", p.Name), zap.Error(err))
		return p
	}
	return decorated
}

// decorateEndpoint is decorateService for an endpoint.
func (s *store) decorateEndpoint(e *Endpoint, api *discovery.Endpoint, slice *discovery.EndpointSlice) {
	if s.options.DecorateEndpoint == nil {
		return
	}
	decorated := *e
	// The hint lists are shared by many endpoints.
	decorated.ZoneHints, decorated.NodeHints = slices.Clone(e.ZoneHints), slices.Clone(e.NodeHints)
	if !s.survives("DecorateEndpoint", func() { s.options.DecorateEndpoint(&decorated, api, slice) }) {
		return
	}
	decorated.Addr = e.Addr
	decorated.ZoneHints = canonicalNames(decorated.ZoneHints)
	decorated.NodeHints = canonicalNames(decorated.NodeHints)
	decorated.Weight = canonicalWeight(decorated.Weight)
	*e = decorated
}

// editEndpoints lets the hook look at what no State has yet. It does not need the lock.
func (s *store) editEndpoints(services []rebuilt) {
	for i := range services {
		for _, p := range services[i].edit {
			p.endpoints = s.edited(p)
		}
	}
}

// edited are the endpoints of a port as the hook leaves them, or as they are when it
// panics. What is no endpoint of the port's family is left out.
func (s *store) edited(p *portState) []Endpoint {
	var list []Endpoint
	if !survives("EditEndpoints", s.logger.Warn, func() { list = s.options.EditEndpoints(p.port, slices.Clone(p.endpoints)) }) {
		return p.endpoints
	}
	var refused netip.AddrPort
	count := len(list)
	list = slices.DeleteFunc(slices.Clone(list), func(e Endpoint) bool {
		a := e.Addr.Addr().Unmap()
		ok := dialable(a) && e.Addr.Port() != 0 && s.options.mayServe(a) && familyOf(a) == p.port.Family
		if !ok {
			refused = e.Addr
		}
		return !ok
	})
	if len(list) < count {
		s.logger.Warn("hook left invalid endpoints, which are left out", zap.String("hook", "EditEndpoints"),
			zap.Stringer("service_port", p.name), zap.Int("count", count-len(list)), zap.Stringer("last", refused))
	}
	for i := range list {
		e := &list[i]
		e.Addr = netip.AddrPortFrom(e.Addr.Addr().Unmap(), e.Addr.Port())
		e.ZoneHints, e.NodeHints, e.Weight = canonicalNames(e.ZoneHints), canonicalNames(e.NodeHints), canonicalWeight(e.Weight)
	}
	slices.SortStableFunc(list, compareByAddr)
	return dropDuplicates(list)
}

// share keeps one list in memory, not two, where a hook has changed nothing.
func (p *portState) share(s *store) {
	if s.sameEndpoints(p.merged, p.endpoints) {
		p.endpoints = p.merged
	}
}

// equalExt compares payloads. A comparison that panics, as == does for types that
// cannot be compared, means different.
func (s *store) equalExt(a, b any) (equal bool) {
	if a == nil && b == nil {
		return true
	}
	if s.options.EqualExt != nil {
		s.survives("EqualExt", func() { equal = s.options.EqualExt(a, b) })
		return equal
	}
	defer func() {
		if recover() != nil {
			equal = false
		}
	}()
	return a == b
}

func (s *store) samePort(a, b *ServicePort) bool {
	return a == b || a.Equal(b) && s.equalExt(a.Ext, b.Ext)
}

// sameRecord compares endpoints that have the same address.
func (s *store) sameRecord(a, b *Endpoint) bool {
	return a.alike(b) && s.equalExt(a.Ext, b.Ext)
}
