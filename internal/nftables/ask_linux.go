package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"iter"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/nft"
)

// The time of a dump grows with the square of the elements: the kernel begins each page of 32 kB
// with a walk from the first element of the set (nft_rhash_walk). To ask for an element by its key
// takes the same time in a set of any size. The keys of the large sets follow from the elements of
// smaller ones: the class of a frontend tells how many endpoints it has. Elements that others have
// added have other keys. So this is a reading of the set only if it found as many elements as the
// kernel counts; if not, the set is dumped. Kernels that do not count (NFTA_SET_COUNT, which 6.12
// does not have) only dump.
//
// An engine that knows what it has written does not ask: it adds all elements again. The kernel
// changes nothing for an element that is there with the same data, and refuses the transaction for
// one that is there with other data (nft_add_set_elem). A transaction that changes nothing is none:
// other programs do not hear of it. An element that another program has replaced by one with another
// key comes back.

const (
	// askFrom is the number of elements from which asking takes less time than a dump, see
	// BenchmarkReading.
	askFrom = 100_000
	// askMessage is how many keys a message has. The kernel ends it at the first that does not
	// exist, and what follows is asked again.
	askMessage = 64
)

// isLarge reports whether a set is large, and its elements are counted.
func (e *Engine) isLarge(o *observation, spec *setSpec) bool {
	set := o.sets[spec.name]
	return set.counted && set.count >= e.askFrom && spec.flags()&unix.NFT_SET_INTERVAL == 0
}

// askSet reads a set by key. It reports whether these are all elements.
func (e *Engine) askSet(ctx context.Context, o *observation, spec *setSpec) (all bool, err error) {
	if !e.isLarge(o, spec) {
		return false, nil
	}
	count := o.sets[spec.name].count
	a := asked{spec: spec, most: int64(count), found: make(map[string]string, count)}
	if err := e.askAll(ctx, o, &a); err != nil {
		return false, err
	}
	return e.takeIfAll(ctx, o, spec, a.found)
}

// claimSet reads a set whose elements the engine knows: it adds them again. It reports whether these are all elements.
func (e *Engine) claimSet(ctx context.Context, o *observation, spec *setSpec) (all bool, err error) {
	if !e.isLarge(o, spec) || len(o.known) == 0 || !slices.Contains(largeSets(), spec.id) {
		return false, nil
	}
	before, err := e.others(ctx)
	if err != nil {
		return false, err
	}
	count := o.sets[spec.name].count
	c := claims{in: spec.id, elements: make(map[string]string, count)}
	for _, p := range o.known {
		diff(&c, nil, p)
	}
	if len(c.elements) != count { // adding them would change the set
		return false, nil
	}
	var due encoded
	for key, data := range c.elements {
		if due.append(elementOf(key), elementBytes{}, elementOf(data)); due.len() < e.stepElements {
			continue
		}
		if claimed, err := e.claim(ctx, spec, &due); !claimed {
			return false, err
		}
	}
	if claimed, err := e.claim(ctx, spec, &due); !claimed {
		return false, err
	}
	all, err = e.takeIfAll(ctx, o, spec, c.elements)
	e.report.Writes += max(0, o.sets[spec.name].count-count) // what has come back
	if err != nil {
		return false, err
	}
	after, err := e.others(ctx)
	return all && after == before, err
}

// largeSets have all their elements from the placements of service ports, for each endpoint.
func largeSets() []setID {
	return []setID{setEndpoints, setNodePortEndpoints, setAffinityPicks, setNodePortAffinityPicks, setAffinityEndpoints}
}

// claim adds elements that are there. It reports whether the kernel accepts them. It counts no transaction, as send does: there
// is none, and one that is counted would hide that of another program.
func (e *Engine) claim(ctx context.Context, spec *setSpec, due *encoded) (claimed bool, err error) {
	if due.len() == 0 {
		return true, nil
	}
	w := e.newBatch()
	w.elements(nft.AddElements(), spec, *due)
	w.Finish()
	due.buf = due.buf[:0]
	if err := e.kernel.Commit(ctx, &w.Batch); !errors.Is(err, unix.EEXIST) {
		return err == nil, err
	}
	return false, nil
}

// claims is a sink that collects the elements of one set.
type claims struct {
	in       setID
	elements map[string]string // key to data
}

func (c *claims) put(in setID, key, _, data elementBytes) {
	if in == c.in {
		c.elements[keyString(key)] = keyString(data)
	}
}

func (c *claims) remove(setID, elementBytes, elementBytes) {}

// takeIfAll takes elements as the content of a set, if it has as many now as it had before: others may have written meanwhile.
func (e *Engine) takeIfAll(ctx context.Context, o *observation, spec *setSpec, found map[string]string) (all bool, err error) {
	after, err := e.listSets(ctx)
	if err != nil {
		return false, err
	}
	before := o.sets[spec.name].count
	o.sets[spec.name] = after[spec.name] // another reading may follow
	if all = len(found) == before && len(found) == after[spec.name].count; all {
		o.element[spec.id] = found
	}
	return all, nil
}

// asked is the state of a reading by key, with one or two sockets.
type asked struct {
	spec *setSpec
	// missing counts keys that do not exist. Where they are most, the smaller sets tell nothing: others have changed them.
	missing atomic.Int64
	most    int64
	mu      sync.Mutex
	found   map[string]string // key to data
}

func (a *asked) add(elements [][2]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range elements {
		a.found[e[0]] = e[1]
	}
}

// askAll asks for all keys. The kernel answers two sockets at the same time.
func (e *Engine) askAll(ctx context.Context, o *observation, a *asked) error {
	lists := make(chan []elementBytes)
	group, stopped := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer close(lists)
		for list := range chunks(o.keysOf(a.spec.id), nft.AnswersAtOnce) {
			select {
			case lists <- list:
			case <-stopped.Done():
				return nil
			}
		}
		return nil
	})
	for _, k := range []kernel{e.kernel, o.second} {
		if k == nil {
			continue
		}
		q := questioner{asked: a, kernel: k, wire: newWire(e.batch.Family, e.batch.Table), perMessage: askMessage}
		group.Go(func() error { return q.askLists(ctx, lists) })
	}
	return group.Wait()
}

// chunks yields what a sequence yields, in lists of this length. The last one may be shorter.
func chunks[T any](all iter.Seq[T], length int) iter.Seq[[]T] {
	return func(yield func([]T) bool) {
		var list []T
		for one := range all {
			if list = append(list, one); len(list) < length {
				continue
			}
			if !yield(list) {
				return
			}
			list = make([]T, 0, length)
		}
		if len(list) > 0 {
			yield(list)
		}
	}
}

// questioner asks with one socket.
type questioner struct {
	*asked

	kernel     kernel
	wire       *wire
	perMessage int // keys: with 1, all that are there are answered at once
	due        []elementBytes
	answers    [][2]string // key and data
}

// askLists asks for lists of keys, unless most of them do not exist.
func (q *questioner) askLists(ctx context.Context, lists <-chan []elementBytes) error {
	for list := range lists {
		for q.due = append(q.due, list...); len(q.due) >= nft.AnswersAtOnce && q.missing.Load() <= q.most; {
			if err := q.ask(ctx); err != nil {
				return err
			}
		}
		if q.missing.Load() > q.most {
			q.due = nil
		}
	}
	for len(q.due) > 0 {
		if err := q.ask(ctx); err != nil {
			return err
		}
	}
	return nil
}

// ask asks for the first keys that are due. Those that are not answered stay due.
func (q *questioner) ask(ctx context.Context) error {
	now := q.due[:min(len(q.due), nft.AnswersAtOnce)]
	q.wire.Buf, q.wire.Messages = q.wire.Buf[:0], q.wire.Messages[:0]
	for keys := range slices.Chunk(now, q.perMessage) {
		q.wire.getElements(q.spec, keys)
	}
	q.answers = q.answers[:0]
	answered := make([]int, len(q.wire.Messages))
	err := q.kernel.Query(ctx, &q.wire.Batch, func(message int, attrs []byte) {
		answered[message]++
		for el := range nft.ElementsOf(attrs) {
			key, data := el.Strings()
			q.answers = append(q.answers, [2]string{key, data})
		}
	})
	if err != nil {
		return err
	}
	q.add(q.answers)
	left := q.due[:0]
	for i, n := range answered {
		keys := now[i*q.perMessage : min((i+1)*q.perMessage, len(now))]
		if n < len(keys) {
			q.missing.Add(1)
			left = append(left, keys[n+1:]...)
		}
	}
	q.due = append(left, q.due[len(now):]...)
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
