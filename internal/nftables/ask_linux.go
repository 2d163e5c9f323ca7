package nftables

import (
	"context"
	"encoding/binary"
	"iter"
	"slices"

	"github.com/serviceplane/serviceplane/internal/nft"
)

// The time of a dump grows with the square of the elements: the kernel begins each page of 32 kB
// with a walk from the first element of the set (nft_rhash_walk). To ask for an element by its key
// takes the same time in a set of any size. The keys of the large sets follow from the elements of
// smaller ones: the class of a frontend tells how many endpoints it has. Elements that others have
// added have other keys. So this is a reading of the set only if it found as many elements as the
// kernel counts; if not, the set is dumped. Kernels that do not count (NFTA_SET_COUNT, which 6.12
// does not have) only dump.

const (
	// askFrom is the number of elements from which asking takes less time than a dump, see
	// BenchmarkReading.
	askFrom = 100_000
	// askMessage is how many keys a message has. The kernel ends it at the first that does not
	// exist, and what follows is asked again.
	askMessage = 64
)

// askSet reads a set by key. It reports whether these are all elements.
func (e *Engine) askSet(ctx context.Context, o *observation, spec *setSpec) (all bool, err error) {
	before := o.sets[spec.name]
	if !before.counted || before.count < e.askFrom {
		return false, nil
	}
	a := asked{spec: spec, found: make(map[string]string, before.count)}
	for key := range o.keysOf(spec.id) {
		if a.due = append(a.due, key); len(a.due) < nft.AnswersAtOnce {
			continue
		}
		// Where most are missing, the smaller sets tell nothing: others have changed them.
		if err := e.ask(ctx, &a); err != nil || a.missing > before.count {
			return false, err
		}
	}
	for len(a.due) > 0 {
		if err := e.ask(ctx, &a); err != nil {
			return false, err
		}
	}
	// Others may have written meanwhile.
	after, err := e.listSets(ctx)
	if err != nil || len(a.found) != before.count || len(a.found) != after[spec.name].count {
		return false, err
	}
	o.element[spec.id] = a.found
	return true, nil
}

// asked is the state of a reading by key.
type asked struct {
	spec    *setSpec
	due     []elementBytes
	found   map[string]string // key to data
	missing int
}

// ask asks for the keys that are due. Those that are not answered stay due.
func (e *Engine) ask(ctx context.Context, a *asked) error {
	w := newWire(e.batch.Family, e.batch.Table)
	w.Buf = e.questions[:0]
	for keys := range slices.Chunk(a.due, askMessage) {
		w.getElements(a.spec, keys)
	}
	e.questions = w.Buf
	answered := make([]int, len(w.Messages))
	err := e.kernel.Query(ctx, &w.Batch, func(message int, attrs []byte) {
		answered[message]++
		for el := range nft.ElementsOf(attrs) {
			key, data := el.Strings()
			a.found[key] = data
		}
	})
	if err != nil {
		return err
	}
	left := a.due[:0]
	for i, n := range answered {
		keys := a.due[i*askMessage : min((i+1)*askMessage, len(a.due))]
		if n < len(keys) {
			a.missing++
			left = append(left, keys[n+1:]...)
		}
	}
	a.due = left
	return nil
}

// keysOf yields the keys that the elements of a large set have, unless somebody has changed it or
// the smaller sets. Some of them do not exist.
func (o *observation) keysOf(id setID) iter.Seq[elementBytes] {
	return func(yield func(elementBytes) bool) {
		switch id {
		case setEndpoints, setNodePortEndpoints, setAffinityPicks, setNodePortAffinityPicks:
			o.indexedKeys(id, yield)
		case setAffinityEndpoints:
			for number := range o.affinityNumbers() {
				if !yield(markData(number)) {
					return
				}
			}
		default: // the smaller sets
		}
	}
}

// affinityNumbers are the numbers of endpoints that frontends pick, and those of the other scope,
// which perhaps no frontend picks.
func (o *observation) affinityNumbers() map[uint32]bool {
	numbers := map[uint32]bool{}
	for _, picks := range []setID{setAffinityPicks, setNodePortAffinityPicks} {
		for _, data := range o.element[picks] {
			number := numberIn(data)
			numbers[number] = true
			other := number ^ affinityLocal
			if _, there := o.element[setAffinityCounts][keyString(markData(other&^affinitySlotMask))]; there {
				numbers[other] = true
			}
		}
	}
	return numbers
}

// indexedKeys yields the keys of the slots of all frontends.
func (o *observation) indexedKeys(id setID, yield func(elementBytes) bool) {
	leads := []setID{setServices, setFirewalled, setLocals, setShortCircuits}
	if id == setNodePortEndpoints || id == setNodePortAffinityPicks {
		leads = []setID{setNodePorts, setNodePortLocals, setNodePortShortCircuits}
	}
	for _, lead := range leads {
		for key, data := range o.element[lead] {
			from, slots := o.slotsOf(id, key, data)
			for i := range slots {
				if !yield(elementOf(key).mark(from + uint32(i))) {
					return
				}
			}
		}
	}
}

// slotsOf returns the first index and the number of the slots to which a frontend leads in a set.
func (o *observation) slotsOf(id setID, frontend, data string) (from uint32, slots int) {
	to := numberIn(data)
	if id == setEndpoints || id == setNodePortEndpoints {
		c := class(to)
		if c&(classOfCount|classIsDraw) != classOfCount {
			return 0, 0
		}
		return offset(c.treatment().scope), min(c.slots(), maxEndpoints)
	}
	keys := setAffinityKeys
	if id == setNodePortAffinityPicks {
		keys = setNodePortAffinityKeys
	}
	number, treatment := numberIn(o.element[keys][frontend])&affinityIDMask, to-classAffinity
	if number == 0 || treatment > 7 { // see class.treatment
		return 0, 0
	}
	scope := int(treatment & 1) // as in treatment.number
	draw := class(numberIn(o.element[setAffinityCounts][keyString(markData(number|scopeBit(scope)))]))
	return offset(indexScope(scope)) | ownBit, min(draw.slots(), maxEndpoints)
}

// numberIn is the number in the data of an element; 0 if it has no data, or other data.
func numberIn(data string) uint32 {
	if len(data) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32([]byte(data))
}
