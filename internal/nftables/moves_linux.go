package nftables

import (
	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// moves finds the service ports of an update that pass frontends to each other. A frontend that has lost its
// service port in one transaction and gets another one in the next would serve nobody meanwhile.
type moves struct {
	changes []desired.Change // of the update, as are was and now
	was     *desired.Resolved
	now     *desired.Resolved
	inFront bool
	first   int   // of changes: the one that is written in its turn
	others  []int // of changes: those that are written together with the first
	begun   int   // how many of the others
	index   map[changetracker.ServicePortName]int
	written map[int]bool // of changes: those that were written before their turn
}

// begin returns a Change, and next returns those that are written together with it; nil after the last one.
func (m *moves) begin(i int) *desired.Change {
	m.first, m.others, m.begun = i, m.others[:0], 0
	return &m.changes[i]
}

func (m *moves) next() *desired.Change {
	if m.begun == len(m.others) {
		return nil
	}
	m.begun++
	return &m.changes[m.others[m.begun-1]]
}

// follow adds the service ports that get the frontends which a service port has lost. Those that lose a frontend come first
// in an update, in any order. So a service port that loses one too, or is written before its turn, may get a frontend that
// another one still has: follow adds that one as well.
func (m *moves) follow(name changetracker.ServicePortName, was, is []placedFrontend) {
	if m.add(name, was, is, m.now) || m.begun > 0 {
		m.add(name, is, was, m.was)
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
	if at, ok := m.changeOf(owner); ok && at > m.first && !m.written[at] {
		m.written[at] = true
		m.others = append(m.others, at)
	}
}

func (m *moves) changeOf(name changetracker.ServicePortName) (at int, ok bool) {
	if m.index == nil {
		m.index, m.written = make(map[changetracker.ServicePortName]int, len(m.changes)), map[int]bool{}
		for i := range m.changes {
			m.index[m.changes[i].Name] = i
		}
	}
	at, ok = m.index[name]
	return at, ok
}
