package nftables

import (
	"context"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// applyFull brings everything in line with the update, whatever the kernel holds.
// A table with our layout is mended element by element, in steps, and what is too
// much goes last; any other table of our name is replaced in one transaction.
func (e *Engine) applyFull(ctx context.Context, update desired.Update, trusted bool) error {
	observed, err := e.observe(ctx)
	if err != nil {
		return err
	}
	l := e.layoutFor(&update.Globals)
	matches := false
	if observed != nil {
		if matches, err = observed.matches(&l); err != nil {
			return err
		}
	}
	if matches {
		if err := e.observeElements(ctx, observed); err != nil {
			return err
		}
		matches = observed.hasVerdicts(e.specs)
	}
	hints := e.begin(l, trusted)
	switch {
	case matches:
		e.adoptClasses(observed)
		return e.mend(ctx, update, &reconciler{t: &e.step, have: &observed.element}, observed, hints)
	case observed == nil:
		return e.load(ctx, update, hints)
	default:
		e.log.Info("replacing a table of another layout", zap.String("table", e.config.Names.Table))
		return e.replace(ctx, update, hints)
	}
}

// begin starts a new state. It returns what the last one had placed, to keep
// endpoints at their indexes.
func (e *Engine) begin(l layout, trusted bool) map[changetracker.ServicePortName]*placed {
	hints, affinity := e.state.placed, e.state.affinity
	if !trusted {
		hints, affinity = nil, newAffinityIDs()
	}
	e.state = state{
		layout:     l,
		placed:     map[changetracker.ServicePortName]*placed{},
		affinity:   affinity,
		classes:    newClassTable(),
		clusterIPs: newRefCounts(setClusterIPs, clusterIPKey),
		hairpins:   newRefCounts(setHairpin, hairpinKey),
	}
	e.step.reset()
	return hints
}

// load fills a table that does not exist yet.
func (e *Engine) load(ctx context.Context, update desired.Update, hints map[changetracker.ServicePortName]*placed) error {
	w := e.newBatch()
	if err := e.scaffold(w); err != nil {
		return err
	}
	if err := e.send(ctx, w); err != nil {
		return e.explain(ctx, err)
	}
	return e.mend(ctx, update, &reconciler{t: &e.step}, nil, hints)
}

// replace puts a new table in the place of one that is not as it should be, in
// one transaction: no packet sees a moment without.
func (e *Engine) replace(ctx context.Context, update desired.Update, hints map[changetracker.ServicePortName]*placed) error {
	oneStep := func() error { return nil }
	if err := e.placeAll(update.Services, &reconciler{t: &e.step}, nil, hints, oneStep); err != nil {
		return err
	}
	e.state.clusterIPs.settle(&e.step)
	e.state.hairpins.settle(&e.step)
	w := e.newBatch()
	w.deleteTable()
	if err := e.scaffold(w); err != nil {
		return err
	}
	if err := e.writeStep(w, &e.step, e.changedGlobals(&update.Globals)); err != nil {
		return err
	}
	e.step.reset()
	return e.send(ctx, w)
}

func (e *Engine) scaffold(w *wire) error {
	if err := w.scaffold(&e.state.layout, e.config.AffinityRecords); err != nil {
		return err
	}
	e.report.Writes += len(w.messages)
	for _, c := range e.state.layout.chains() {
		e.state.classes.chains[c.name] = true
	}
	return nil
}

// mend writes what is missing or wrong in a table of our layout, service port by
// service port, then takes away what is too much.
func (e *Engine) mend(
	ctx context.Context, update desired.Update, r *reconciler, observed *observation,
	hints map[changetracker.ServicePortName]*placed,
) error {
	stepDone := func() error {
		if r.t.elements < stepElements {
			return nil
		}
		return e.commitMend(ctx, r, nil)
	}
	if err := e.placeAll(update.Services, r, observed, hints, stepDone); err != nil {
		return err
	}
	if observed != nil {
		e.state.globals = observed.globals(&update.Globals)
	}
	if err := e.commitMend(ctx, r, e.changedGlobals(&update.Globals)); err != nil {
		return err
	}
	e.state.globals = update.Globals
	if observed == nil {
		return nil
	}
	if err := e.removeRest(ctx, r); err != nil {
		return err
	}
	return e.removeUnusedClasses(ctx)
}

// placeAll puts every service port into the sets, with a call of stepDone after
// each.
func (e *Engine) placeAll(
	services []*desired.Service, r *reconciler, observed *observation,
	hints map[changetracker.ServicePortName]*placed, stepDone func() error,
) error {
	if observed != nil && len(hints) == 0 {
		hints = e.adoptAll(services, observed)
	}
	for _, s := range services {
		p := e.place(hints[s.Name], s, r.t)
		e.state.placed[s.Name] = p
		e.state.count(p, 1)
		diff(r, nil, p)
		if err := stepDone(); err != nil {
			return err
		}
	}
	return nil
}

func (e *Engine) commitMend(ctx context.Context, r *reconciler, more func(*wire)) error {
	e.state.clusterIPs.settle(r)
	e.state.hairpins.settle(r)
	return e.commit(ctx, r.t, more)
}

// removeRest deletes the elements that nothing asked for.
func (e *Engine) removeRest(ctx context.Context, r *reconciler) error {
	for id := range r.have {
		keyLen := padded(e.specs[id].key, 4*e.state.layout.rules.addrRegs())
		for key := range r.have[id] {
			first, last := elementOf(key[:keyLen]), elementOf(key[keyLen:])
			r.t.remove(setID(id), first, last)
			if r.t.elements < stepElements {
				continue
			}
			if err := e.commit(ctx, r.t, nil); err != nil {
				return err
			}
		}
	}
	return e.commit(ctx, r.t, nil)
}

func elementOf(b string) elementBytes {
	var e elementBytes
	e.n = uint8(copy(e.buf[:], b))
	return e
}

// spareClasses is how many unused classes may stay: endpoint counts come and go,
// and each commit of anybody in the network namespace walks all chains.
const spareClasses = 128

// removeUnusedClasses deletes the chains of classes that nobody has any more. The
// elements that lead to them go in a transaction of their own, because kernels
// before 6.2 still count them as users within the same one.
func (e *Engine) removeUnusedClasses(ctx context.Context) error {
	unused := e.state.classes.unused(e.state.classesInUse())
	if len(unused) <= spareClasses {
		return nil
	}
	w := e.newBatch()
	for _, c := range unused {
		for _, in := range c.reachedFrom() {
			w.elementMessage(deleteElements(), &e.specs[in], appendElement(nil, nativeMark(c.id), nil, nil))
			e.report.Writes++
		}
	}
	if err := e.send(ctx, w); err != nil {
		return err
	}
	w = e.newBatch()
	for _, c := range unused {
		w.flushChain(c.chain())
		w.deleteChain(c.chain())
		e.report.Writes++
		e.state.classes.remove(c.forwarding)
	}
	for _, chain := range e.state.classes.orphanedAffinityChains() {
		w.flushChain(chain)
		w.deleteChain(chain)
		e.report.Writes++
		delete(e.state.classes.chains, chain)
	}
	return e.send(ctx, w)
}

func (s *state) classesInUse() map[uint32]bool {
	inUse := map[uint32]bool{}
	for _, p := range s.placed {
		for i := range p.frontends {
			f := &p.frontends[i]
			for _, class := range []uint32{f.entry, f.firewalled, f.outside, f.inside} {
				inUse[class] = true
			}
		}
	}
	return inUse
}

// reconciler is an elementSink that writes only what the kernel does not have. It
// strikes off what it has, so that the rest is what is too much.
type reconciler struct {
	t    *transaction
	have *[numSets]map[string]string // nil when the table is new
}

func (r *reconciler) put(in setID, key, keyEnd, data elementBytes) {
	if r.have != nil && len(r.have[in]) > 0 {
		k := string(key.bytes()) + string(keyEnd.bytes())
		if old, ok := r.have[in][k]; ok {
			delete(r.have[in], k)
			if old == string(data.bytes()) {
				return
			}
			r.t.remove(in, key, keyEnd)
		}
	}
	r.t.put(in, key, keyEnd, data)
}

func (r *reconciler) remove(setID, elementBytes, elementBytes) {}

// adoptClasses takes over the numbers of the classes in the kernel.
func (e *Engine) adoptClasses(o *observation) {
	for name := range o.chains {
		e.state.classes.chains[name] = true
	}
	for id, chain := range o.verdict[setClasses] {
		if f, ok := parseForwarding(chain); ok {
			e.state.classes.adopt(f, id)
		}
	}
}

// adoptAll finds out at which indexes the endpoints of the service ports stand in
// the kernel, and under which numbers affinity records know them.
func (e *Engine) adoptAll(services []*desired.Service, o *observation) map[changetracker.ServicePortName]*placed {
	hints := make(map[changetracker.ServicePortName]*placed, len(services))
	taken := map[uint32]bool{}
	for _, s := range services {
		p := &placed{}
		var affinity *affinityService
		for i := range s.Frontends {
			key := s.Key(&s.Frontends[i])
			if s.Affinity > 0 && affinity == nil {
				affinity = e.adoptAffinity(s, key, o, taken)
			}
			for scope := range p.lists {
				if p.lists[scope] == nil {
					p.lists[scope] = o.listOf(key, scope, affinity)
				}
			}
		}
		hints[s.Name] = p
	}
	return hints
}

// adoptAffinity takes over the number of a service port, unless it is taken.
func (e *Engine) adoptAffinity(s *desired.Service, key desired.Key, o *observation, taken map[uint32]bool) *affinityService {
	data := o.element[forKind(key, setAffinityIDs, setNodePortAffinityIDs)][keyString(frontendKey(key))]
	if len(data) != 4 {
		return nil
	}
	id := binary.NativeEndian.Uint32([]byte(data)) >> affinitySlotLen
	if id == 0 || id > maxAffinityID || taken[id] || e.state.affinity.services[s.Name] != nil {
		return nil
	}
	taken[id] = true
	return e.state.affinity.adopt(s.Name, id)
}

// listOf reads the endpoints of one scope under the key of a frontend, in order
// of index. Those of a service port with affinity are numbered as they were.
func (o *observation) listOf(key desired.Key, scope int, affinity *affinityService) []target {
	x := indexed{in: forKind(key, setEndpoints, setNodePortEndpoints), from: offset(indexScope(scope))}
	if affinity != nil {
		x.in, x.from = forKind(key, setAffinityPicks, setNodePortAffinityPicks), x.from|ownBit
	}
	var list []target
	for i := range maxEndpoints {
		data, ok := o.element[x.in][keyString(x.key(key, i))]
		if !ok {
			break
		}
		t, ok := o.targetOf(data, affinity)
		if !ok {
			break
		}
		list = append(list, t)
	}
	return list
}

func (o *observation) targetOf(data string, affinity *affinityService) (t target, ok bool) {
	if affinity == nil {
		addr, ok := parseAddrPort(data)
		return target{addr: addr}, ok
	}
	if len(data) != 4 {
		return target{}, false
	}
	id := binary.NativeEndian.Uint32([]byte(data))
	addr, ok := parseAddrPort(o.element[setAffinityEndpoints][data])
	if ok && id&affinityIDMask == affinity.key() {
		affinity.adopt(addr, id&maxAffinitySlot)
	}
	return target{addr: addr, id: id}, ok
}

func keyString(k elementBytes) string { return string(k.bytes()) }

func parseAddrPort(data string) (ap netip.AddrPort, ok bool) {
	n := len(data) - 4
	if n < 0 {
		return ap, false
	}
	addr, ok := netip.AddrFromSlice([]byte(data[:n]))
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16([]byte(data[n:]))), ok
}

// hasVerdicts says whether the verdict maps lead every class where it belongs.
func (o *observation) hasVerdicts(specs []setSpec) bool {
	want := [numSets]map[uint32]string{}
	for id := range want {
		want[id] = map[uint32]string{}
	}
	for class, to := range staticClasses() {
		for _, in := range to.from {
			want[in][class] = to.chain
		}
	}
	chains := 0
	for id, chain := range o.verdict[setClasses] {
		f, ok := parseForwarding(chain)
		if !ok {
			continue
		}
		chains++
		for _, in := range f.reachedFrom() {
			want[in][id] = chain
		}
	}
	for i := range specs {
		if len(specs[i].data) > 0 && specs[i].data[0] == fieldVerdict && !maps.Equal(o.verdict[i], want[i]) {
			return false
		}
	}
	return chains == o.countClasses()
}

func (o *observation) countClasses() int {
	n := 0
	for name := range o.chains {
		if _, ok := parseForwarding(name); ok {
			n++
		}
	}
	return n
}

// globals returns want with every list that the kernel does not hold taken out,
// so that it counts as changed.
func (o *observation) globals(want *desired.Globals) desired.Globals {
	g := *want
	for _, id := range intervalSets() {
		if slices.Equal(o.ranges[id], ranges(prefixesOf(want, id))) {
			continue
		}
		wrong := []netip.Prefix{{}}
		switch id { //nolint:exhaustive // only the interval sets hold prefixes
		case setServiceCIDRs:
			g.ServiceCIDRs = wrong
		case setNodePortAddresses:
			g.NodePortAddresses = wrong
		default:
			g.PodCIDRs = wrong
		}
	}
	return g
}
