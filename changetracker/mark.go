package changetracker

import (
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// maxTouched is how many addresses of a port are stored one by one.
const maxTouched = 1024

// touched says which endpoints of a port changed: all, or only the listed addresses.
type touched struct {
	portKey
	all bool
	// again says that the records in slices are the same, but overrides or hooks may give
	// another result.
	again bool
	addrs []netip.AddrPort
}

func (t *touched) none() bool { return t == nil || !t.all && len(t.addrs) == 0 }

// repeats reports whether overrides and hooks must run again.
func (t *touched) repeats() bool { return t != nil && t.again }

func (t *touched) merge(o touched) {
	t.again = t.again || o.again
	if t.all = t.all || o.all || len(t.addrs)+len(o.addrs) > maxTouched; t.all {
		t.addrs = nil
		return
	}
	t.addrs = append(t.addrs, o.addrs...)
	slices.SortFunc(t.addrs, netip.AddrPort.Compare)
	t.addrs = slices.Compact(t.addrs)
}

// mark stores what changed of a Service. Service ports that changed are not listed: they are
// compared by pointer.
type mark struct {
	name      types.NamespacedName
	since     time.Time // arrival of the first change
	endpoints map[portKey]*touched
	// refreshed are the ports that Refresh names. They count as changed until they are applied.
	refreshed map[portKey]struct{}
	slices    int                 // how many changes of slices
	moved     map[frontendKey]way // for queue
	taken     bool                // from its queue
}

func (m *mark) refresh(key portKey) {
	m.touch(touched{portKey: key, again: true})
	if m.refreshed == nil {
		m.refreshed = map[portKey]struct{}{}
	}
	m.refreshed[key] = struct{}{}
}

// refreshes reports whether Refresh names a port that the Service has.
func (m *mark) refreshes(p *portState) bool {
	if len(m.refreshed) == 0 || p == nil || p.port == nil {
		return false
	}
	_, ok := m.refreshed[p.key()]
	return ok
}

func (m *mark) touch(t touched) {
	if own := m.endpoints[t.portKey]; own != nil {
		own.merge(t)
		return
	}
	if m.endpoints == nil {
		m.endpoints = map[portKey]*touched{}
	}
	m.endpoints[t.portKey] = &t
}

func (m *mark) merge(o *mark) {
	m.since = earlier(m.since, o.since)
	for _, t := range o.endpoints {
		m.touch(*t)
	}
	for key := range o.refreshed {
		m.refresh(key)
	}
}

// touched returns what changed in the endpoints of a port, or nil.
func (m *mark) touched(key portKey) *touched { return m.endpoints[key] }

// touches reports whether all endpoints of a port count as changed.
func (m *mark) touches(key portKey) bool {
	if m == nil {
		return false
	}
	t := m.touched(key)
	return t != nil && t.all
}

// earlier returns the earlier of two times. The zero time means none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
