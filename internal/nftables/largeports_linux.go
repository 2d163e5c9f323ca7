package nftables

import (
	"context"
	"iter"

	"github.com/serviceplane/serviceplane/internal/nft"
)

// A service port with thousands of endpoints has more elements than a step. Then its slots have transactions of their own, in
// an order in which it serves all the time: first the slots that nothing leads to yet, then those that change, then, in one
// transaction, what leads to the slots, and last the slots that nothing leads to any more.

// largeStep times stepElements is the number of elements beyond which slots have transactions of their own.
const largeStep = 4

// slotSets have most elements of a large service port. They are written in this order: what masquerades an endpoint that dials
// itself, then the endpoints of affinity numbers, then the slots.
func slotSets() []setID {
	return []setID{setHairpin, setAffinityEndpoints, setEndpoints, setNodePortEndpoints, setAffinityPicks, setNodePortAffinityPicks}
}

// takeSlots takes slots out of a transaction: fresh, changed and stale ones. A changed slot stays if it may change with its
// owner, or if a number leads to another endpoint.
func (t *transaction) takeSlots(addrLen int) (fresh, changed, stale *transaction) {
	fresh, changed, stale = &transaction{}, &transaction{}, &transaction{}
	for _, in := range slotSets() {
		adds, deletes, keyLen := t.adds[in], t.deletes[in], nft.Padded(setSpecs[in].key, addrLen)
		t.adds[in], t.deletes[in] = encoded{}, encoded{}
		t.elements -= adds.len() + deletes.len()
		old := make(map[string][]byte, deletes.len())
		for element := range deletes.all() {
			old[keyIn(element, keyLen)] = element
		}
		for element := range adds.all() {
			key := keyIn(element, keyLen)
			was, changes := old[key]
			delete(old, key)
			switch {
			case !changes:
				fresh.take(&fresh.adds[in], element)
			case t.moves || in == setAffinityEndpoints:
				t.moves = true
				t.take(&t.deletes[in], was)
				t.take(&t.adds[in], element)
			default:
				changed.take(&changed.deletes[in], was)
				changed.take(&changed.adds[in], element)
			}
		}
		for element := range deletes.all() {
			if _, goes := old[keyIn(element, keyLen)]; goes {
				stale.take(&stale.deletes[in], element)
			}
		}
	}
	return fresh, changed, stale
}

func (t *transaction) take(in *encoded, element []byte) {
	in.buf, in.size = append(in.buf, element...), len(element)
	t.elements++
}

// keyIn is the key in an encoded element, after the headers of the element, the key and its value.
func keyIn(element []byte, keyLen int) string { return string(element[12 : 12+keyLen]) }

func (e *encoded) len() int { return len(e.buf) / max(e.size, 1) }

func (e *encoded) all() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for rest := e.buf; len(rest) > 0; rest = rest[e.size:] {
			if !yield(rest[:e.size]) {
				return
			}
		}
	}
}

// cut returns the first n elements, or all, and removes them.
func (e *encoded) cut(n int) encoded {
	n = min(n*e.size, len(e.buf))
	first := encoded{e.buf[:n], e.size}
	e.buf = e.buf[n:]
	return first
}

// takeLarge takes the slots out of a large transaction: those that are written before the rest, and after it.
func (e *Engine) takeLarge(t *transaction) (first, last []*transaction) {
	if t.elements <= largeStep*e.stepElements {
		return nil, nil
	}
	fresh, changed, stale := t.takeSlots(e.addrLen())
	return []*transaction{fresh, changed}, []*transaction{stale}
}

// commitSlots sends slots in steps.
func (e *Engine) commitSlots(ctx context.Context, parts ...*transaction) error {
	for _, t := range parts {
		e.report.Writes += t.elements
		for _, in := range slotSets() {
			for t.adds[in].len()+t.deletes[in].len() > 0 {
				w := e.newBatch()
				w.elements(nft.DeleteElements(), &setSpecs[in], t.deletes[in].cut(e.stepElements))
				w.elements(nft.AddElements(), &setSpecs[in], t.adds[in].cut(e.stepElements))
				if err := e.send(ctx, w); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
