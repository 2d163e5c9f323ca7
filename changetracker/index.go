package changetracker

import (
	"cmp"
	"iter"
	"net/netip"

	"k8s.io/utils/third_party/forked/golang/btree"
)

// index finds service ports by their addresses, and by their ports of the node. Versions
// of it share what is the same in both.
type index = btree.BTree[entry]

// entry is something that a service port can be found by.
type entry struct {
	kind entryKind
	port uint16     // 0 for endpointEntry
	addr netip.Addr // the zero Addr for a port of the node
	name *ServicePortName
}

type entryKind uint8

const (
	vipEntry entryKind = iota
	nodePortEntry
	healthPortEntry
	endpointEntry
)

// compare puts together what is looked up together.
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

// indexEditor makes the next version of an index. It copies nothing before something
// changes. The store's lock must be held, since a copy touches what it is made of.
type indexEditor struct {
	version   *index
	owned     bool // version is a copy, which may be changed
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

// replace puts what is found of a Service in the place of what was.
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
			e.replaceEndpoints((*anyOf(x, y)).name, was.endpoints, is.endpoints)
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

// replacePort is replace for a service port, nil if there is none.
func (e *indexEditor) replacePort(was, is *ServicePort) {
	for x := range was.entries() {
		e.own().Delete(x)
	}
	for x := range is.entries() {
		e.own().ReplaceOrInsert(x)
	}
}

// entries yields all of a service port, but for healthEntry.
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

// replaceEndpoints is replace for the endpoints of a service port, sorted by address. An
// address counts once, whatever its ports.
func (e *indexEditor) replaceEndpoints(of ServicePortName, was, is []Endpoint) {
	if len(was) == len(is) && (len(is) == 0 || &was[0] == &is[0]) {
		return
	}
	name := new(of)
	byAddr := func(x, y *Endpoint) int { return x.Addr.Compare(y.Addr) }
	walk(was, is, byAddr, func(x, y *Endpoint) {
		switch {
		case x == nil:
			e.own().ReplaceOrInsert(entry{kind: endpointEntry, addr: y.Addr.Addr(), name: name})
		case y == nil && !hasAddr(is, x.Addr.Addr()):
			e.own().Delete(entry{kind: endpointEntry, addr: x.Addr.Addr(), name: name})
		}
	})
}
