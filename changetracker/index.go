package changetracker

import (
	"cmp"
	"iter"
	"net/netip"

	"github.com/serviceplane/serviceplane/internal/sorted"
	"k8s.io/utils/third_party/forked/golang/btree"
)

// index finds service ports by their addresses, node ports and health check node ports.
// Versions share the parts that are equal.
type index = btree.BTree[entry]

// entry is a key under which a service port is found.
type entry struct {
	kind entryKind
	port uint16     // 0 for endpointEntry
	addr netip.Addr // the zero Addr for node ports and health check node ports
	name *ServicePortName
}

type entryKind uint8

const (
	vipEntry entryKind = iota
	nodePortEntry
	healthPortEntry
	endpointEntry
)

// compare sorts entries that are looked up together next to each other.
func (e entry) compare(o entry) int {
	if c := cmp.Or(cmp.Compare(e.kind, o.kind), e.addr.Compare(o.addr), cmp.Compare(e.port, o.port)); c != 0 {
		return c
	}
	return e.name.Compare(*o.name)
}

func newIndex() *index {
	const degree = 16 // nodes of 15 to 31 entries
	return btree.New(degree, func(a, b entry) bool { return a.compare(b) < 0 })
}

// indexEditor makes the next version of an index. It copies nothing until something changes.
// The caller holds the store's lock, because a copy also writes to its original.
type indexEditor struct {
	version   *index
	owned     bool // version is a copy that may change
	endpoints bool // Options.IndexEndpoints
}

func (e *indexEditor) own() *index {
	if !e.owned {
		e.version, e.owned = e.version.Clone(), true
	}
	return e.version
}

// freeze returns the version with all changes so far.
func (e *indexEditor) freeze() *index {
	e.owned = false
	return e.version
}

// replace replaces the entries of a Service.
func (e *indexEditor) replace(old, next *serviceState) {
	byName := func(x, y **portState) int { return (*x).name.Compare((*y).name) }
	walk(old.all(), next.all(), byName, func(x, y **portState) {
		var was, is portState
		if x != nil {
			was = **x
		}
		if y != nil {
			is = **y
		}
		if was.port != is.port {
			e.replacePort(was.port, is.port)
		}
		if e.endpoints {
			e.replaceEndpoints((*anyOf(x, y)).name, &was.endpoints, &is.endpoints)
		}
	})
	if was, is := old.health(), next.health(); was != is {
		if was != nil {
			e.own().Delete(healthEntry(was))
		}
		if is != nil {
			e.own().ReplaceOrInsert(healthEntry(is))
		}
	}
}

// replacePort replaces the entries of a service port; nil means that there is none.
func (e *indexEditor) replacePort(was, is *ServicePort) {
	for x := range was.entries() {
		e.own().Delete(x)
	}
	for x := range is.entries() {
		e.own().ReplaceOrInsert(x)
	}
}

// entries yields all entries of a service port except healthEntry.
func (p *ServicePort) entries() iter.Seq[entry] {
	return func(yield func(entry) bool) {
		if p == nil {
			return
		}
		for addr := range p.vips() {
			if !yield(entry{kind: vipEntry, addr: addr, port: p.Port, name: &p.Name}) {
				return
			}
		}
		if p.NodePort != 0 {
			yield(entry{kind: nodePortEntry, port: p.NodePort, name: &p.Name})
		}
	}
}

func healthEntry(p *ServicePort) entry {
	return entry{kind: healthPortEntry, port: p.HealthCheckNodePort, name: &p.Name}
}

// replaceEndpoints replaces the entries of the endpoints of a service port. An address
// with several ports is one entry.
func (e *indexEditor) replaceEndpoints(of ServicePortName, was, is *endpointList) {
	if was.Same(is) {
		return
	}
	name := new(of)
	sorted.Walk(was, is, byAddr, func(x, y *Endpoint) {
		switch {
		case x == nil:
			e.own().ReplaceOrInsert(entry{kind: endpointEntry, addr: y.Addr.Addr(), name: name})
		case y == nil && !hasAddr(is, x.Addr.Addr()):
			e.own().Delete(entry{kind: endpointEntry, addr: x.Addr.Addr(), name: name})
		}
	})
}
