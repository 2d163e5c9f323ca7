package nftables

import (
	"github.com/serviceplane/serviceplane/internal/nft"
)

// transaction collects the element writes of one step, in any order: all deletions are sent
// before all additions, so that a key may move between service ports.
type transaction struct {
	adds     [numSets]encoded
	deletes  [numSets]encoded
	classes  []class // whose chains do not exist yet
	elements int
	// departing are the counters whose elements in maps to endpoints are deleted.
	departing []departure
	// moves says that a slot may change with its owner.
	moves  bool
	record *record // for a check that runs; nil: for none
}

// encoded holds elements of one set, as the kernel expects them, all of one length.
type encoded struct {
	buf  []byte
	size int
}

func (t *transaction) put(in setID, key, keyEnd, data elementBytes) {
	t.adds[in].append(key, keyEnd, data)
	t.count(in, key)
}

func (t *transaction) remove(in setID, key, keyEnd elementBytes) {
	t.deletes[in].append(key, keyEnd, elementBytes{})
	t.count(in, key)
}

func (t *transaction) count(in setID, key elementBytes) {
	if t.elements++; t.record != nil {
		t.record.written[elementKey{in, key}] = true
	}
}

func (e *encoded) append(key, keyEnd, data elementBytes) {
	before := len(e.buf)
	e.buf = nft.AppendElement(e.buf, key.bytes(), keyEnd.bytes(), data.bytes())
	e.size = len(e.buf) - before
}

// write adds the elements to a batch.
func (t *transaction) write(w *wire) {
	for i := range t.deletes {
		w.elements(nft.DeleteElements(), &setSpecs[i], t.deletes[i])
	}
	for i := range t.adds {
		w.elements(nft.AddElements(), &setSpecs[i], t.adds[i])
	}
}

// reset empties the transaction but keeps its memory.
func (t *transaction) reset() {
	for i := range t.adds {
		t.adds[i].buf = t.adds[i].buf[:0]
		t.deletes[i].buf = t.deletes[i].buf[:0]
	}
	t.classes = t.classes[:0]
	t.elements, t.moves = 0, false
	t.departing = t.departing[:0]
}
