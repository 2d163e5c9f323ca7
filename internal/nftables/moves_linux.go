package nftables

import (
	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// moves finds the service ports of an update that pass frontends to each other. A frontend that has lost its
// service port in one transaction and gets another one in the next would serve nobody meanwhile.
type moves struct {
	update  *desired.Update
	inFront bool
	queue   []int // of Changes: those that are written together
	few     [4]int
	at      int // in queue
	index   map[changetracker.ServicePortName]int
	written map[int]bool // of Changes: those that were written before their turn
}

func (m *moves) begin(i int) { m.queue, m.at = append(m.few[:0], i), 0 }

func (m *moves) more() bool { return m.at < len(m.queue) }

func (m *moves) next() *desired.Change {
	m.at++
	return &m.update.Changes[m.queue[m.at-1]]
}

// follow adds to the queue who gets the frontends that a service port has lost, and who had those that it gets. Whoever
// loses a frontend comes first in an update: so all have lost their frontends before one gets them in its own turn, but
// not before one that is written earlier, or that loses others.
func (m *moves) follow(name changetracker.ServicePortName, was, is []placedFrontend) {
	if m.add(name, was, is, m.update.Now) || m.at > 1 {
		m.add(name, is, was, m.update.Was)
	}
}

// add adds the owners of the frontends that are not among others; all are in order. It reports whether there
// are such frontends.
func (m *moves) add(name changetracker.ServicePortName, frontends, others []placedFrontend, of *desired.Resolved) (found bool) {
	for i := range frontends {
		key := frontends[i].key
		for len(others) > 0 && others[0].key.Compare(key) < 0 {
			others = others[1:]
		}
		if len(others) > 0 && others[0].key == key {
			continue
		}
		found = true
		m.join(name, key, of)
		for _, other := range of.Conflicting(key) {
			m.join(name, other, of)
		}
	}
	return found
}

// join adds the owner of a frontend; a frontend that has none is refused in front of an engine that may still have it.
func (m *moves) join(name changetracker.ServicePortName, key desired.Key, of *desired.Resolved) {
	owner, ok := of.Owner(key)
	if !ok && m.inFront {
		owner, ok = refusedName(key), true
	}
	if !ok || owner == name {
		return
	}
	if at, ok := m.changeOf(owner); ok && at > m.queue[0] && !m.written[at] {
		m.written[at] = true
		m.queue = append(m.queue, at)
	}
}

func (m *moves) changeOf(name changetracker.ServicePortName) (at int, ok bool) {
	if m.index == nil {
		m.index, m.written = make(map[changetracker.ServicePortName]int, len(m.update.Changes)), map[int]bool{}
		for i := range m.update.Changes {
			m.index[m.update.Changes[i].Name] = i
		}
	}
	at, ok = m.index[name]
	return at, ok
}
