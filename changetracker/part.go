package changetracker

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Part says how much a Delta has at most, so that a change of one Service need not wait for all that came
// before it. The zero Part is everything.
type Part struct {
	// Size is about how many service ports there are; 0 is all.
	Size int
	// First are Services that come before all others, beyond Size.
	First []types.NamespacedName
}

// queue orders the dirty Services of a family for parts. Those that are taken stay in their lines until they
// are the first.
type queue struct {
	all line
	// turns are the namespaces in the order of their turns, of which turn is the next; nil: nothing is left.
	// tenants has them by name. The last fresh Services of all are not in theirs yet.
	turns   []*tenant
	turn    int
	tenants map[string]*tenant
	fresh   int
	moved   map[frontendKey]*passage
}

// passage is what becomes of a frontend: the dirty Services that have won it, and those that have lost it. Some may be
// taken, or both.
type passage struct{ won, lost line }

// way is how a frontend moves. A Service may both lose and win it.
type way uint8

const (
	won way = 1 << iota
	lost
)

// with removes the marks that must come with one that is taken: all, if one of them loses the frontend and another one
// wins it. An address with all its ports needs only one that wins it for each one that loses it. If all win it, or all
// lose it, they may come one by one: between them, another one of them may have it.
func (p *passage) with(f frontendKey, w way) (marks line) {
	passesOn, takesOver := w&lost != 0 && p.won.first() != nil, w&won != 0 && p.lost.first() != nil
	switch {
	case f.port != 0 && (passesOn || takesOver):
		marks = append(p.won, p.lost...)
		p.won, p.lost = nil, nil
	case f.port == 0 && passesOn:
		marks = p.won[:1]
	}
	return marks
}

func (p *passage) empty() bool { return p.won.first() == nil && p.lost.first() == nil }

// smallQueue is how many Services a queue has that is used again.
const smallQueue = 64

// reset empties the queue.
func (q *queue) reset() {
	if cap(q.all) > smallQueue || len(q.moved) > smallQueue || len(q.tenants) > 0 {
		*q = queue{} // slices and maps never shrink
		return
	}
	clear(q.all)
	clear(q.moved)
	q.all, q.fresh = q.all[:0], 0
}

// tenant is a namespace with its dirty Services.
type tenant struct {
	namespace string
	line
}

// line holds marks in the order of their first event.
type line []*mark

// first returns the first mark that is not taken, or nil.
func (l *line) first() *mark {
	for len(*l) > 0 && (*l)[0].taken {
		(*l)[0] = nil
		*l = (*l)[1:]
	}
	if len(*l) == 0 {
		return nil
	}
	return (*l)[0]
}

func (q *queue) add(m *mark) {
	q.all = append(q.all, m)
	q.fresh++
}

// share puts fresh Services into the lines of their namespaces.
func (q *queue) share() {
	for _, m := range q.all[len(q.all)-q.fresh:] {
		t := q.tenants[m.name.Namespace]
		if t == nil {
			t = &tenant{namespace: m.name.Namespace}
			q.turns = append(q.turns, t)
			if q.tenants == nil {
				q.tenants = map[string]*tenant{}
			}
			q.tenants[t.namespace] = t
		}
		t.line = append(t.line, m)
	}
	q.fresh = 0
}

// next returns the first Service of the namespace that has its turn, or nil if there is none.
func (q *queue) next() *mark {
	for len(q.turns) > 0 {
		if q.turn == len(q.turns) {
			q.turns, q.turn = slices.DeleteFunc(q.turns, func(t *tenant) bool { return t == nil }), 0
			continue
		}
		t := q.turns[q.turn]
		m := t.first()
		if m == nil {
			delete(q.tenants, t.namespace)
			q.turns[q.turn] = nil
		}
		q.turn++
		if m != nil {
			return m
		}
	}
	return nil
}

// take appends a mark to those that are taken, and all others that frontends move to or from. m may be nil.
func (q *queue) take(taken []*mark, m *mark) []*mark {
	if m == nil || m.taken {
		return taken
	}
	m.taken = true
	taken = append(taken, m)
	for i := len(taken) - 1; i < len(taken); i++ {
		for f, w := range taken[i].moved {
			p := q.moved[f]
			if p == nil {
				continue
			}
			for _, other := range p.with(f, w) {
				if !other.taken {
					other.taken = true
					taken = append(taken, other)
				}
			}
			if p.empty() {
				delete(q.moved, f)
			}
		}
		taken[i].moved = nil
	}
	return taken
}

// frontendKey is a VIP or, with the zero Addr, a node port; with port 0 it is an address with all its ports.
type frontendKey struct {
	addr     netip.Addr
	port     uint16
	protocol v1.Protocol
}

// move records the frontends that a dirty Service wins or loses when one of its ports changes. A VIP that is
// an address of the node counts as the node port of the same number, which conflicts with it, and so does a health
// check node port, which only one Service can listen on. An external address is announced while any Service has it.
func (q *queue) move(m *mark, from, to *ServicePort, node *Node) {
	q.record(m, lost, from, to, node)
	q.record(m, won, to, from, node)
}

// record records what one version of a service port has, and the other one has not.
func (q *queue) record(m *mark, w way, p, other *ServicePort, node *Node) {
	for e := range p.entries() {
		if other.has(&e) {
			continue
		}
		f := frontendKey{addr: e.addr, port: e.port, protocol: e.name.Protocol}
		if slices.Contains(node.Addresses, f.addr) {
			f.addr = netip.Addr{}
		} else if e.addr.IsValid() && e.addr != p.ClusterIP && !other.hasVIP(e.addr) {
			q.recordOne(m, w, frontendKey{addr: e.addr})
		}
		q.recordOne(m, w, f)
	}
	if port := p.checkedPort(); port != 0 && port != other.checkedPort() {
		q.recordOne(m, w, frontendKey{port: port, protocol: v1.ProtocolTCP})
	}
}

func (q *queue) recordOne(m *mark, w way, f frontendKey) {
	known := m.moved[f]
	if known&w != 0 {
		return
	}
	if q.moved == nil {
		q.moved = map[frontendKey]*passage{}
	}
	if m.moved == nil {
		m.moved = map[frontendKey]way{}
	}
	p := q.moved[f]
	if p == nil {
		p = &passage{}
		q.moved[f] = p
	}
	if m.moved[f] = known | w; w == won {
		p.won = append(p.won, m)
	} else {
		p.lost = append(p.lost, m)
	}
}

// checkedPort is the health check node port, 0 for none.
func (p *ServicePort) checkedPort() uint16 {
	if p == nil {
		return 0
	}
	return p.HealthCheckNodePort
}

// has reports whether a service port, which may be nil, has the VIP or node port of another one.
func (p *ServicePort) has(e *entry) bool {
	if p == nil || p.Name.Protocol != e.name.Protocol {
		return false
	}
	if e.kind == nodePortEntry {
		return p.NodePort == e.port
	}
	return p.Port == e.port && p.hasVIP(e.addr)
}

// hasVIP reports whether a service port, which may be nil, has a VIP.
func (p *ServicePort) hasVIP(addr netip.Addr) bool {
	if p == nil {
		return false
	}
	in := func(sorted []netip.Addr) bool {
		_, found := slices.BinarySearchFunc(sorted, addr, netip.Addr.Compare)
		return found
	}
	return p.ClusterIP == addr || in(p.LoadBalancerVIPs) || in(p.ExternalIPs)
}

// take appends the dirty Services that the next Delta has, which are dirty no more.
func (f *family) take(taken []*mark, part *Part, full bool) []*mark {
	if f.queue == nil {
		f.queue = &queue{}
	}
	if part.Size <= 0 || full || f.fits(part.Size) {
		for _, m := range f.dirty {
			taken = append(taken, m)
		}
	} else {
		taken = f.takePart(taken, part)
	}
	if len(taken) < len(f.dirty) {
		for _, m := range taken {
			delete(f.dirty, m.name)
		}
	} else if len(taken) > 0 {
		f.dirty = map[types.NamespacedName]*mark{} // a new map, because maps never shrink
		f.queue.reset()
	}
	return taken
}

// fits reports whether everything dirty fits into a part.
func (f *family) fits(size int) bool {
	if len(f.dirty) > size {
		return false
	}
	for name := range f.dirty {
		size -= f.weight(name)
	}
	return size >= 0
}

// takePart appends the Services that come first, the oldest change, and then one Service of each namespace in turn.
// So a namespace with few gets all, and every change is taken after a number of parts that is known when it comes.
func (f *family) takePart(taken []*mark, part *Part) []*mark {
	q := f.queue
	q.share()
	for _, name := range part.First {
		taken = q.take(taken, f.dirty[name])
	}
	taken = q.take(taken, q.all.first())
	for left := part.Size; left > 0; {
		m := q.next()
		if m == nil {
			break
		}
		taken = q.take(taken, m)
		left -= f.weight(m.name)
	}
	return taken
}

// weight is about how many service ports of a Service change.
func (f *family) weight(name types.NamespacedName) int {
	was, _ := f.current.services.Get(name)
	n := len(was.all())
	if s := f.services[name]; s != nil {
		n = max(n, len(s.ports))
	}
	return max(n, 1)
}
