package changetracker

import (
	"fmt"
	"net/netip"
	"slices"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// survives runs a hook of the embedding program and reports whether it returned. A hook that
// panics must not end the node's proxy.
func (c *config) survives(hook string, run func()) (ok bool) { return survives(hook, c.warn, run) }

// survives is config.survives for a caller that does not hold the lock.
func survives(hook string, warn func(string, ...zap.Field), run func()) (ok bool) {
	defer func() {
		if r := recover(); r != nil {
			warn("hook of the embedding program panicked, and counts as not called", zap.String("hook", hook), zap.String("panic", readable(fmt.Sprint(r))))
		}
	}()
	run()
	return true
}

// selects reports whether the Service is for this proxy (CFG-02 for the label). A Select hook
// that panics is ignored.
func (c *config) selects(service *v1.Service) bool {
	name, labelled := service.Labels[LabelServiceProxyName]
	if labelled != (c.options.ServiceProxyName != "") || name != c.options.ServiceProxyName {
		return false
	}
	if c.options.Select == nil {
		return true
	}
	selected := true
	if !c.survives("Select", func() { selected = c.options.Select(service) }) {
		return true
	}
	return selected
}

// decorateService returns p as the hook leaves it, or p itself if the hook panics. If it leaves an invalid service port, p
// is closed for whom the hook may have wanted to keep out.
func (c *config) decorateService(p *ServicePort, service *v1.Service) *ServicePort {
	if c.options.DecorateService == nil {
		return p
	}
	decorated := p.clone()
	if !c.survives("DecorateService", func() { c.options.DecorateService(decorated, service) }) {
		return p
	}
	decorated.Name, decorated.Family = p.Name, p.Family
	if err := decorated.canonicalise(len(service.Spec.Ports)); err != nil {
		c.warn("hook left an invalid service port, which is ignored", zap.Stringer("service_port", p.Name), zap.Error(err))
		closed := p.clone()
		closed.DenyAllSources = p.DenyAllSources || decorated.DenyAllSources || len(decorated.DeniedSources) > 0
		if decorated.ExposeOn != "" {
			closed.ExposeOn = NoNode
		}
		return closed
	}
	return decorated
}

// decorateEndpoint is decorateService for an endpoint.
func (c *config) decorateEndpoint(e *Endpoint, api *discovery.Endpoint, slice *discovery.EndpointSlice) {
	if c.options.DecorateEndpoint == nil {
		return
	}
	decorated := *e
	// Many endpoints share the hint lists.
	decorated.ZoneHints, decorated.NodeHints = slices.Clone(e.ZoneHints), slices.Clone(e.NodeHints)
	if !c.survives("DecorateEndpoint", func() { c.options.DecorateEndpoint(&decorated, api, slice) }) {
		return
	}
	decorated.Addr = e.Addr
	decorated.tidy()
	*e = decorated
}

// edited returns the endpoints of a port as the hook leaves them, or unchanged if it panics.
// Invalid endpoints and those of the other family are left out.
func (c *config) edited(p *portState) []Endpoint {
	var list []Endpoint
	if !survives("EditEndpoints", c.logger.Warn, func() { list = c.options.EditEndpoints(p.port, slices.Clone(p.endpoints.Slice())) }) {
		return p.endpoints.Slice()
	}
	var refused netip.AddrPort
	count := len(list)
	list = slices.DeleteFunc(slices.Clone(list), func(e Endpoint) bool {
		a := e.Addr.Addr().Unmap()
		ok := dialable(a) && e.Addr.Port() != 0 && c.options.mayServe(a) && familyOf(a) == p.port.Family
		if !ok {
			refused = e.Addr
		}
		return !ok
	})
	if len(list) < count {
		c.logger.Warn("invalid endpoints of a hook are ignored", zap.String("hook", "EditEndpoints"),
			zap.Stringer("service_port", p.name), zap.Int("count", count-len(list)), zap.Stringer("last", refused))
	}
	for i := range list {
		e := &list[i]
		e.Addr = netip.AddrPortFrom(e.Addr.Addr().Unmap(), e.Addr.Port())
		e.tidy()
	}
	slices.SortStableFunc(list, compareByAddr)
	return dropDuplicates(list)
}

// share keeps one list in memory instead of two if the hook has changed nothing.
func (p *portState) share(c *config) {
	if c.sameEndpoints(p.merged.Slice(), p.endpoints.Slice()) {
		p.endpoints = p.merged
	}
}

// equalExt compares payloads. If the comparison panics, as == does for types that are not
// comparable, they are different.
func (c *config) equalExt(a, b any) (equal bool) {
	if a == nil && b == nil {
		return true
	}
	if c.options.EqualExt != nil {
		c.survives("EqualExt", func() { equal = c.options.EqualExt(a, b) })
		return equal
	}
	defer func() {
		if recover() != nil {
			equal = false
		}
	}()
	return a == b
}

func (c *config) samePort(a, b *ServicePort) bool {
	return a == b || a.Equal(b) && c.equalExt(a.Ext, b.Ext)
}

// sameRecord compares endpoints that have the same address.
func (c *config) sameRecord(a, b *Endpoint) bool {
	return a.alike(b) && c.equalExt(a.Ext, b.Ext)
}

func (c *config) sameEndpoints(a, b []Endpoint) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Addr != b[i].Addr || !c.sameRecord(&a[i], &b[i]) {
			return false
		}
	}
	return true
}
