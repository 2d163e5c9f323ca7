package nftables

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Packets count connections in sets of their own, under the keys of the maps to endpoints: only
// the first packet of a connection reaches the rules of these maps. So endpoints without
// connections cost nothing, and elements of the maps may be written again without harm.

// countersOf returns the set of the counters of a map to endpoints or to limits; ok is false for other sets.
func countersOf(in setID) (counters setID, ok bool) {
	switch in {
	case setEndpoints:
		return setEndpointCounters, true
	case setNodePortEndpoints:
		return setNodePortEndpointCounters, true
	case setAffinityEndpoints:
		return setAffinityEndpointCounters, true
	case setLimits:
		return setRefused, true
	default:
		return 0, false
	}
}

// counterSets are the sets of counters.
func counterSets() []setID {
	return []setID{setEndpointCounters, setNodePortEndpointCounters, setAffinityEndpointCounters, setRefused}
}

// counterLimit is the size of each set. A connection whose counter does not fit is not counted.
const counterLimit = 1 << 20

// counterKey identifies a counter.
type counterKey struct {
	in  setID
	key elementBytes
}

// counts is the state of counting.
type counts struct {
	ledger *counting.Ledger[counterKey]
	// found means that the kernel can count; missing is what it lacks.
	found   bool
	missing error
	// late are the counters that did not exist when they lost their owner, in the last update: a packet
	// on its way may make one.
	late []counterKey
}

func newCounts() *counts { return &counts{ledger: counting.NewLedger[counterKey]()} }

// counting reports whether connections are counted. It is called by Apply.
func (e *Engine) counting() bool { return e.counts != nil && e.counts.missing == nil }

// findCounters finds out, before the first full update, whether the kernel can count. A further
// full update asks again for what was missing: its module may have been loaded.
func (e *Engine) findCounters(ctx context.Context, update *desired.Update) error {
	c := e.counts
	if c == nil || c.found || !update.Full {
		return nil
	}
	f := feature{
		name: "counters in sets", option: "CONFIG_NFT_COUNTER", set: &setSpecs[setAffinityEndpointCounters],
		exprs: append(rule{priority(0)}, count(setAffinityEndpointCounters)),
	}
	switch err := e.probeUnlessLoading(ctx, f, c.missing != nil); {
	case err == nil:
		c.found, c.missing = true, nil
	case !isUnknown(err):
		return fmt.Errorf("probe nf_tables for counters: %w", err)
	case c.missing == nil:
		c.missing = fmt.Errorf("%w: %w", errors.ErrUnsupported, f.missing(err))
		e.log.Warn("connections are not counted: the kernel cannot", zap.Error(c.missing))
	}
	return nil
}

// Counts is for proxier.Abilities.
func (e *Engine) Counts(ctx context.Context) (connection.Counts, error) {
	if e.counts == nil {
		return connection.Counts{}, counting.ErrOff
	}
	e.mu.Lock()
	began, missing := e.counts.ledger.Clock(), e.counts.missing
	e.mu.Unlock()
	if missing != nil {
		return connection.Counts{}, missing
	}
	values, err := e.readCounters(ctx)
	if err != nil {
		return connection.Counts{}, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(values) > 0 {
		o := e.state.owners()
		for counter, value := range values {
			e.counts.ledger.Add(counter, value, o.of(counter), began)
		}
	}
	return e.counts.ledger.Counts(), nil
}

// readCounters reads all counters, with a socket of its own.
func (e *Engine) readCounters(ctx context.Context) (values map[counterKey]uint64, err error) {
	k, err := e.open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, k.Close()) }()
	values = map[counterKey]uint64{}
	for _, id := range counterSets() {
		err := e.listCounters(ctx, k, id, values)
		if err != nil && !errors.Is(err, unix.ENOENT) { // before the first sync, or damaged
			return nil, err
		}
	}
	return values, nil
}

// listCounters reads the counters of a set. While nf_tables changes it may miss some, which the
// next reading has.
func (e *Engine) listCounters(ctx context.Context, k kernel, id setID, values map[counterKey]uint64) error {
	keyLen := nft.Padded(setSpecs[id].key, 4*(&rules{v6: e.family == v1.IPv6Protocol}).addrRegs())
	err := e.listElementsOf(ctx, k, &setSpecs[id], func() {}, func(el nft.Element) {
		if len(el.Key) == keyLen { // otherwise another program has made a set of the name
			values[counterKey{id, elementOf(string(el.Key))}] = el.Packets
		}
	})
	if errors.Is(err, netlinkx.ErrInterrupted) {
		return nil
	}
	return err
}

// beginFull is called before a full sync. It returns the owners of counters, nil if connections
// are not counted. What the counters of a previous process have counted is nobody's.
func (e *Engine) beginFull(ctx context.Context, o *observation, ours bool) (*owners, error) {
	if !e.counting() {
		return nil, nil
	}
	before := e.state.owners()
	e.counts.ledger.Begin(time.Now())
	if !ours {
		e.counts.ledger.ForgetAll()
		return before, nil
	}
	there := slices.DeleteFunc(counterSets(), func(id setID) bool { _, there := o.sets[setName(id)]; return !there })
	if _, err := e.addCounters(ctx, there, before.of); err != nil {
		return nil, err
	}
	return before, nil
}

// addCounters reads the counters of sets, adds them for their owners, and returns their values.
func (e *Engine) addCounters(ctx context.Context, sets []setID, owner func(counterKey) counting.Owner) (map[counterKey]uint64, error) {
	values := map[counterKey]uint64{}
	for _, id := range sets {
		if err := e.listCounters(ctx, e.kernel, id, values); err != nil {
			return nil, err
		}
	}
	for counter, value := range values {
		e.counts.ledger.Add(counter, value, owner(counter), e.counts.ledger.Clock())
	}
	return values, nil
}

// endFull adds what was counted during the full sync: for the owners from before it, as addRetired
// does. It deletes the counters without owner, which do not count any more: not those that have lost
// it in this sync, since a packet on its way may still count.
func (e *Engine) endFull(ctx context.Context, before *owners) error {
	if !e.counting() {
		return nil
	}
	now, t := e.state.owners(), e.beginStep()
	there := slices.DeleteFunc(counterSets(), func(id setID) bool { return !e.state.layout.rules.has(&setSpecs[id]) })
	values, err := e.addCounters(ctx, there, func(counter counterKey) counting.Owner { return cmp.Or(before.of(counter), now.of(counter)) })
	if err != nil {
		return err
	}
	e.counts.retire(e.departed(before))
	var stale []counterKey
	for counter := range values {
		if now.of(counter) != (counting.Owner{}) || before.of(counter) != (counting.Owner{}) {
			continue
		}
		t.remove(counter.in, counter.key, elementBytes{})
		if stale = append(stale, counter); t.elements < e.stepElements {
			continue
		}
		if err := e.commit(ctx, t, nil); err != nil {
			return err
		}
	}
	err = e.commit(ctx, t, nil)
	if err == nil && len(stale) > 0 {
		e.counts.ledger.Forget(stale...)
	}
	return err
}

// departure is a counter that loses its owner with the transaction.
type departure struct {
	counterKey

	owner counting.Owner
}

// departures is a sink that also lists the counters that lose their owner.
type departures struct {
	elementSink

	list *[]departure
	name changetracker.ServicePortName
	prev *placed
}

func (d departures) remove(in setID, key, keyEnd elementBytes) {
	d.elementSink.remove(in, key, keyEnd)
	if counters, ok := countersOf(in); ok {
		*d.list = append(*d.list, departure{
			counterKey{counters, key}, counting.Owner{Name: d.name, Endpoint: d.prev.endpointAt(counters, key), Refused: counters == setRefused},
		})
	}
}

// sink returns the sink for the changes of a service port.
func (e *Engine) sink(t *transaction, name changetracker.ServicePortName, prev *placed) elementSink {
	if !e.counting() || prev == nil {
		return t
	}
	return departures{t, &t.departing, name, prev}
}

// nowhere is a sink of what need not be written.
type nowhere struct{}

func (nowhere) put(setID, elementBytes, elementBytes, elementBytes) {}
func (nowhere) remove(setID, elementBytes, elementBytes)            {}

// departed returns the counters that have lost their owner in a full sync.
func (e *Engine) departed(before *owners) (list []departure) {
	for name, prev := range before.placed {
		diff(departures{nowhere{}, &list, name, prev}, prev, e.state.placed[name])
	}
	return list
}

// retire is for counters that have lost their owner, and whose numbers are added. A packet that was on
// its way through the rules may still count there, or make the counter: it counts for the service port.
func (c *counts) retire(departed []departure) {
	for _, d := range departed {
		value := c.ledger.Value(d.counterKey)
		if c.ledger.Add(d.counterKey, value, counting.Owner{Name: d.owner.Name, Refused: d.owner.Refused}, c.ledger.Clock()); value == 0 {
			c.late = append(c.late, d.counterKey)
		}
	}
}

// forgetLate is called before each update: packets that were on their way in the last one have arrived.
func (c *counts) forgetLate() {
	if c == nil {
		return
	}
	c.late = slices.DeleteFunc(c.late, func(counter counterKey) bool { return c.ledger.Value(counter) > 0 })
	if len(c.late) > 0 {
		c.ledger.Forget(c.late...)
	}
	c.late = nil
}

// addRetired adds what counters have counted for the owners that they have just lost. A connection
// that the next owner of a counter got since then counts for the last one.
func (e *Engine) addRetired(ctx context.Context, departed []departure) error {
	for rest := departed; len(rest) > 0; {
		batch := rest[:min(len(rest), nft.AnswersAtOnce)]
		rest = rest[len(batch):]
		w := newWire(e.batch.Family, e.batch.Table)
		owners := make(map[counterKey]counting.Owner, len(batch))
		for _, d := range batch {
			owners[d.counterKey] = d.owner
			w.getElements(&setSpecs[d.in], []elementBytes{d.key})
		}
		err := e.kernel.Query(ctx, &w.Batch, func(_ int, attrs []byte) {
			in := setNamed(netlinkx.String(netlinkx.Find(attrs, unix.NFTA_SET_ELEM_LIST_SET))).id
			for el := range nft.ElementsOf(attrs) {
				counter := counterKey{in, elementOf(string(el.Key))}
				e.counts.ledger.Add(counter, el.Packets, owners[counter], e.counts.ledger.Clock())
			}
		})
		if err != nil {
			return err
		}
		e.counts.retire(batch)
	}
	return nil
}

// endpointAt returns the endpoint that a counter of the service port counts.
func (p *placed) endpointAt(counters setID, key elementBytes) netip.AddrPort {
	if counters == setRefused {
		return netip.AddrPort{}
	}
	number := binary.NativeEndian.Uint32(key.buf[key.n-4:])
	if counters == setAffinityEndpointCounters {
		for i := range p.lists {
			for _, t := range p.affinityList(i).all() {
				if t.id == number {
					return t.addr
				}
			}
		}
		return netip.AddrPort{}
	}
	scope := scopeIndex(desired.ScopeCluster)
	if number >= localOffset {
		scope, number = scopeIndex(desired.ScopeLocal), number-localOffset
	}
	if list := p.lists[scope]; int(number) < list.len() {
		return list.at(int(number)).addr
	}
	return netip.AddrPort{}
}

// owners finds the owners of counters in a state.
type owners struct {
	placed    map[changetracker.ServicePortName]*placed
	frontends map[desired.Key]portOf
	affinity  map[elementBytes]counting.Owner
}

type portOf struct {
	name changetracker.ServicePortName
	*placed
}

func (s *state) owners() *owners {
	o := &owners{placed: s.placed, frontends: map[desired.Key]portOf{}, affinity: map[elementBytes]counting.Owner{}}
	for name, p := range s.placed {
		for i := range p.frontends {
			o.frontends[p.frontends[i].key] = portOf{name, p}
		}
		if p.affinity == 0 {
			continue
		}
		for i := range p.lists {
			for _, t := range p.affinityList(i).all() {
				o.affinity[markData(t.id)] = counting.Owner{Name: name, Endpoint: t.addr}
			}
		}
	}
	return o
}

// of returns the owner of a counter; the zero Owner if it has none.
func (o *owners) of(c counterKey) counting.Owner {
	if c.in == setAffinityEndpointCounters {
		return o.affinity[c.key]
	}
	if c.in == setRefused {
		port, ok := o.frontends[parseFrontendKey(c.key.buf[:c.key.n])]
		return either(ok, counting.Owner{Name: port.name, Refused: true}, counting.Owner{})
	}
	port, ok := o.frontends[parseFrontendKey(c.key.buf[:c.key.n-4])]
	if !ok || port.affinity != 0 {
		return counting.Owner{}
	}
	endpoint := port.endpointAt(c.in, c.key)
	if !endpoint.IsValid() {
		return counting.Owner{}
	}
	return counting.Owner{Name: port.name, Endpoint: endpoint}
}
