package nftables

import (
	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// kin finds the service ports of an update that pass frontends to each other. A frontend that has lost its
// service port in one transaction and gets another one in the next would serve nobody meanwhile.
type kin struct {
	update  *desired.Update
	queue   []int // of Changes: those that are written together
	few     [4]int
	at      int // in queue
	index   map[changetracker.ServicePortName]int
	written map[int]bool // of Changes: those that were written before their turn
}

func (k *kin) begin(i int) { k.queue, k.at = append(k.few[:0], i), 0 }

func (k *kin) more() bool { return k.at < len(k.queue) }

func (k *kin) next() *desired.Change {
	k.at++
	return &k.update.Changes[k.queue[k.at-1]]
}

// follow adds to the queue who gets the frontends that a service port has lost. Deleted service ports and losers come
// first in an update, in any order: so a loser may get frontends of a later one.
func (k *kin) follow(name changetracker.ServicePortName, was, is []placedFrontend) {
	if k.add(name, was, is, k.update.Now) {
		k.add(name, is, was, k.update.Was)
	}
}

// add adds the owners of the frontends that are not among others; all are in order. It reports whether there are any.
func (k *kin) add(name changetracker.ServicePortName, frontends, others []placedFrontend, of *desired.Resolved) (found bool) {
	for i := range frontends {
		key := frontends[i].key
		for len(others) > 0 && others[0].key.Compare(key) < 0 {
			others = others[1:]
		}
		if len(others) > 0 && others[0].key == key {
			continue
		}
		owner, ok := of.Owner(key)
		if !ok || owner == name {
			continue
		}
		found = true
		if at, ok := k.changeOf(owner); ok && at > k.queue[0] && !k.written[at] {
			k.written[at] = true
			k.queue = append(k.queue, at)
		}
	}
	return found
}

func (k *kin) changeOf(name changetracker.ServicePortName) (at int, ok bool) {
	if k.index == nil {
		k.index, k.written = make(map[changetracker.ServicePortName]int, len(k.update.Changes)), map[int]bool{}
		for i := range k.update.Changes {
			k.index[k.update.Changes[i].Name] = i
		}
	}
	at, ok = k.index[name]
	return at, ok
}
