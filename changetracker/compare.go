package changetracker

import (
	"github.com/serviceplane/serviceplane/internal/sorted"
	"k8s.io/apimachinery/pkg/types"
)

// compareServices appends the differences of a Service between committed and current, sorted
// by name.
func (f *family) compareServices(changes []PortChange, name types.NamespacedName) []PortChange {
	before, _ := f.committed.services.Get(name)
	after, _ := f.current.services.Get(name)
	if before == after {
		return changes
	}
	m := f.pending[name]
	byName := func(x, y **portState) int { return (*x).name.Compare((*y).name) }
	walk(before.all(), after.all(), byName, func(x, y **portState) {
		if c, differs := f.comparePorts(deref(x), deref(y), m); differs {
			changes = append(changes, c)
		}
	})
	return changes
}

func deref[T any](p **T) *T {
	if p == nil {
		return nil
	}
	return *p
}

// comparePorts compares a port before and after; either may be nil. Only endpoints that the
// mark names are compared.
func (f *family) comparePorts(before, after *portState, m *mark) (c PortChange, differs bool) {
	refreshed := m.refreshes(after)
	if before == after && !refreshed {
		return c, false
	}
	was, is := &endpointList{}, &endpointList{}
	if before != nil {
		c.Name, c.Before, was = before.name, before.port, &before.endpoints
	}
	if after != nil {
		c.Name, c.After, is = after.name, after.port, &after.endpoints
	}
	f.compareEndpoints(&c, was, is, m.touched(c.Name.key()))
	differs = refreshed || len(c.Added)+len(c.Removed) > 0 || (c.Before == nil) != (c.After == nil)
	return c, differs || c.Before != nil && !f.samePort(c.Before, c.After)
}

// compareEndpoints sets Added and Removed.
func (f *family) compareEndpoints(c *PortChange, was, is *endpointList, t *touched) {
	switch {
	case t.none():
	case was.Len() == 0 || is.Len() == 0:
		c.Added, c.Removed = is.Slice(), was.Slice()
	case t.all:
		sorted.Walk(was, is, byAddr, func(x, y *Endpoint) { f.compareEndpoint(c, x, y) })
	default:
		for _, addr := range t.addrs {
			f.compareEndpoint(c, endpointAt(was, addr), endpointAt(is, addr))
		}
	}
}

func (f *family) compareEndpoint(c *PortChange, x, y *Endpoint) {
	if x == nil && y == nil || x != nil && y != nil && f.sameRecord(x, y) {
		return
	}
	if x != nil {
		c.Removed = append(c.Removed, *x)
	}
	if y != nil {
		c.Added = append(c.Added, *y)
	}
}
