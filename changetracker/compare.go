package changetracker

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// compareServices appends the differences of a Service between committed and
// current, sorted by name.
func (f *family) compareServices(changes []Change, name types.NamespacedName) []Change {
	before, _ := f.committed.services.Get(name)
	after, _ := f.current.services.Get(name)
	if before == after {
		return changes
	}
	m := f.pending[name]
	walkPorts(before, after, func(x, y *portState) {
		if c, differs := f.comparePorts(x, y, m); differs {
			changes = append(changes, c)
		}
	})
	return changes
}

// walkPorts visits the ports of two Services in order of name, with nil for the
// one that does not have it.
func walkPorts(a, b *serviceState, visit func(x, y *portState)) {
	var x, y []*portState
	if a != nil {
		x = a.ports
	}
	if b != nil {
		y = b.ports
	}
	for len(x) > 0 && len(y) > 0 {
		switch c := x[0].name.Compare(y[0].name); {
		case c < 0:
			visit(x[0], nil)
			x = x[1:]
		case c > 0:
			visit(nil, y[0])
			y = y[1:]
		default:
			visit(x[0], y[0])
			x, y = x[1:], y[1:]
		}
	}
	for _, p := range x {
		visit(p, nil)
	}
	for _, p := range y {
		visit(nil, p)
	}
}

// comparePorts compares a port as it was and as it is; either may be nil. The
// mark bounds the search for changed endpoints.
func (f *family) comparePorts(before, after *portState, m *mark) (c Change, differs bool) {
	if before == after {
		return c, false
	}
	var was, is []Endpoint
	if before != nil {
		c.Name, c.Before, was = before.name, before.port, before.endpoints
	}
	if after != nil {
		c.Name, c.After, is = after.name, after.port, after.endpoints
	}
	f.compareEndpoints(&c, was, is, m.touched(portKey{port: c.Name.Port, protocol: c.Name.Protocol}))
	differs = len(c.Added)+len(c.Removed) > 0 || (c.Before == nil) != (c.After == nil)
	return c, differs || c.Before != nil && !f.store.samePort(c.Before, c.After)
}

// compareEndpoints fills in what was added and removed.
func (f *family) compareEndpoints(c *Change, was, is []Endpoint, t *touched) {
	switch {
	case t.none():
	case len(was) == 0 || len(is) == 0:
		c.Added, c.Removed = slices.Clip(is), slices.Clip(was)
	case t.all:
		walk(was, is, func(x, y *Endpoint) { f.compareEndpoint(c, x, y) })
	default:
		for _, addr := range t.addrs {
			f.compareEndpoint(c, findEndpoint(was, addr), findEndpoint(is, addr))
		}
	}
}

func (f *family) compareEndpoint(c *Change, x, y *Endpoint) {
	if x == nil && y == nil || x != nil && y != nil && f.store.sameEndpoint(x, y) {
		return
	}
	if x != nil {
		c.Removed = append(c.Removed, *x)
	}
	if y != nil {
		c.Added = append(c.Added, *y)
	}
}
