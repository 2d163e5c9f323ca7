package nftables

import (
	"context"
	"maps"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// repair makes a table of ours match the update while packets use it: the table of a
// previous process, of another version or configuration, or one that another program
// damaged. It never empties objects in use, so that no connection fails and session
// affinity lasts.
type repair struct {
	*Engine
	observed *observation
	rest     reconciler
	// newSets means that sets were missing. Then the rules follow the elements; otherwise
	// they come first, because damaged rules affect most packets.
	newSets bool
}

// repair adds what is missing, and then deletes what is extra.
func (e *Engine) repair(
	ctx context.Context, update desired.Update, o *observation, hints map[changetracker.ServicePortName]*placed,
	before *owners,
) error {
	r := &repair{Engine: e, observed: o, rest: reconciler{t: &e.step, have: &o.element}}
	if err := r.createSets(ctx); err != nil {
		return err
	}
	if err := e.observeVerdicts(ctx, o); err != nil {
		return err
	}
	r.adoptClasses()
	if err := r.createChains(ctx); err != nil {
		return err
	}
	if !r.newSets {
		if err := r.switchRules(ctx); err != nil {
			return err
		}
	}
	if err := r.observeElements(ctx, hints); err != nil {
		return err
	}
	r.state.classes.keepLimits(o, &update, r.state.layout.rules.v6)
	defer r.state.classes.forgetLimits()
	if len(hints) == 0 {
		hints = (&takeover{e, o, false}).hints(&update)
	}
	e.state.globals = o.globals(&update.Globals)
	if err := e.writeAll(ctx, update, &r.rest, hints); err != nil {
		return err
	}
	if r.newSets {
		if err := r.switchRules(ctx); err != nil {
			return err
		}
	}
	for _, id := range []setID{setServices, setNodePorts} {
		for key := range o.element[id] {
			e.left = append(e.left, parseFrontendKey([]byte(key)))
		}
	}
	if err := r.removeRest(ctx, before); err != nil {
		return err
	}
	return r.endFull(ctx, before)
}

// observeElements reads them with what the engine knows of them: nothing after a restart.
func (r *repair) observeElements(ctx context.Context, known map[changetracker.ServicePortName]*placed) error {
	o := r.observed
	if o.whole { // packets may have written counters since, if the last process counted
		return r.observeSets(ctx, o, func(s *setSpec) bool { return slices.Contains(counterSets(), s.id) && !r.packetsWrite(s) })
	}
	if o.known = known; len(known) == 0 {
		o.second = r.secondSocket(o)
		defer o.closeSecond()
	}
	return r.Engine.observeElements(ctx, o)
}

// createSets creates the missing sets and the flowtable, and empties other sets of catch-all elements.
func (r *repair) createSets(ctx context.Context) error {
	w := r.newBatch()
	empty := len(w.Messages)
	for i := range setSpecs {
		if _, ok := r.observed.sets[setSpecs[i].name]; !ok && r.state.layout.rules.has(&setSpecs[i]) {
			w.newSet(&setSpecs[i], r.setSize(&setSpecs[i]))
		}
	}
	r.newSets = len(w.Messages) > empty
	for name := range r.observed.chains {
		r.createLimitSets(w, name)
	}
	if _, ok := r.observed.flows[flowtableOfOurs]; !ok && r.state.layout.rules.fastAfter > 0 {
		w.newFlowtable()
	}
	for _, id := range r.observed.catches {
		w.CatchAll(nft.DeleteElements(), setSpecs[id].name)
	}
	return r.sendUnless(ctx, w, empty)
}

// createLimitSets creates the missing sets of the class that has a chain.
func (r *repair) createLimitSets(w *wire, chain string) {
	c, _ := parseLimit(chain)
	for _, s := range c.limitSets() {
		if _, ok := r.observed.sets[s.Name]; !ok {
			w.NewSet(&s)
			r.observed.sets[s.Name] = observedSet{}
		}
	}
}

// sendUnless sends a batch unless it has only the messages of an empty one.
func (r *repair) sendUnless(ctx context.Context, w *wire, empty int) error {
	writes := len(w.Messages) - empty
	if writes == 0 {
		return nil
	}
	r.report.Writes += writes
	return r.send(ctx, w)
}

// adoptClasses takes over the classes in the kernel.
func (r *repair) adoptClasses() {
	for _, elements := range r.observed.verdict {
		for id, to := range elements {
			if c, ok := parseClass(to.chain); ok && uint32(c) == id {
				r.state.classes.adopt(c)
			}
		}
	}
}

// wanted returns all chains that must exist now.
func (r *repair) wanted() []chainSpec {
	specs := r.state.layout.chains()
	for _, c := range r.state.classes.sorted() {
		specs = append(specs, r.state.layout.classChain(c))
	}
	return specs
}

// createChains creates the missing chains and the elements that lead classes to them: the
// rules of a previous process may send packets there before ours do. Base chains are
// created later.
func (r *repair) createChains(ctx context.Context) error {
	w := r.newBatch()
	empty := len(w.Messages)
	var missing []chainSpec
	for _, c := range r.wanted() {
		if r.observed.chains[c.name] == nil && c.hook == nil {
			missing = append(missing, c)
			r.createLimitSets(w, c.name)
			sums, err := c.checksums(r.state.layout.family())
			if err != nil {
				return err
			}
			r.observed.chains[c.name] = &observedChain{rules: sums}
		}
	}
	if err := w.chains(missing); err != nil {
		return err
	}
	wanted := wantedVerdicts(r.state.classes.sorted())
	for id := range wanted {
		have := r.observed.verdict[id]
		for _, class := range slices.Sorted(maps.Keys(wanted[id])) {
			to, ok := have[class]
			if ok && to == wanted[id][class] {
				continue
			}
			if ok {
				w.deleteMark(&setSpecs[id], class)
			}
			w.verdictElement(&setSpecs[id], class, wanted[id][class].chain)
		}
	}
	return r.sendUnless(ctx, w, empty)
}

// wantedVerdicts are the elements of the verdict maps.
func wantedVerdicts(classes []class) (want [numSets]map[uint32]lead) {
	add := func(in setID, class uint32, chain string) {
		if want[in] == nil {
			want[in] = map[uint32]lead{}
		}
		want[in][class] = lead{chain, setSpecs[in].jumps}
	}
	for class, to := range staticClasses() {
		for _, in := range to.from {
			add(in, class, to.chain)
		}
	}
	for _, c := range classes {
		for _, in := range c.reachedFrom() {
			add(in, uint32(c), c.chain())
		}
	}
	return want
}

// switchRules replaces all wrong rules in one transaction: a packet sees the old rules or
// the new ones. To change hook, priority or version, a base chain is replaced.
func (r *repair) switchRules(ctx context.Context) error {
	w := r.newBatch()
	empty := len(w.Messages)
	if r.observed.dormant {
		w.wakeTable()
	}
	wanted := r.wanted()
	known := map[string]bool{}
	var wrong []chainSpec
	for i := range wanted {
		known[wanted[i].name] = true
		if wanted[i].hook == nil && r.observed.chains[wanted[i].name] == nil {
			continue // its class was added since the reading: a commit has written the rules
		}
		ok, err := r.observed.hasChain(&wanted[i], &r.state.layout)
		if err != nil {
			return err
		}
		if !ok {
			wrong = append(wrong, wanted[i])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.observed.chains)) {
		if !known[name] {
			w.empty(name, r.observed.chains[name])
		}
	}
	for _, c := range wrong {
		w.empty(c.name, r.observed.chains[c.name])
	}
	if err := w.chains(wrong); err != nil {
		return err
	}
	return r.sendUnless(ctx, w, empty)
}

// empty deletes the rules of a chain, and the chain itself if it is a base chain.
func (w *wire) empty(name string, c *observedChain) {
	if c == nil {
		return
	}
	if len(c.rules) > 0 {
		w.FlushChain(name)
	}
	if c.isBase {
		w.DeleteChain(name)
	}
}

// removeRest deletes what is extra: elements, then elements that lead to chains, then
// chains. Each kind has its own transaction, because kernels before 6.2 count an element
// that is deleted in the same transaction as a user of the chain.
func (r *repair) removeRest(ctx context.Context, before *owners) error {
	if err := r.removeElements(ctx); err != nil {
		return err
	}
	if err := r.endLimits(ctx, before); err != nil {
		return err
	}
	for _, remove := range []func(*wire){r.removeVerdicts, r.removeSets, r.removeChains, r.removeFlowtables} {
		w := r.newBatch()
		empty := len(w.Messages)
		remove(w)
		if err := r.sendUnless(ctx, w, empty); err != nil {
			return err
		}
	}
	return r.removeUnusedClasses(ctx)
}

// removeElements deletes, in steps, the elements that no service port has.
func (r *repair) removeElements(ctx context.Context) error {
	t := r.rest.t
	for id := range r.observed.element {
		keyLen := nft.Padded(setSpecs[id].key, r.addrLen())
		for key := range r.observed.element[id] {
			t.remove(setID(id), elementOf(key[:keyLen]), elementOf(key[keyLen:]))
			if t.elements < r.stepElements {
				continue
			}
			if err := r.commit(ctx, t, nil); err != nil {
				return err
			}
		}
	}
	return r.commit(ctx, t, nil)
}

func elementOf(b string) elementBytes {
	var e elementBytes
	e.n = uint8(copy(e.buf[:], b))
	return e
}

func (r *repair) removeVerdicts(w *wire) {
	wanted := wantedVerdicts(r.state.classes.sorted())
	for id, have := range r.observed.verdict {
		for _, class := range slices.Sorted(maps.Keys(have)) {
			if _, ok := wanted[id][class]; !ok {
				w.deleteMark(&setSpecs[id], class)
			}
		}
	}
}

func (r *repair) removeSets(w *wire) {
	ours := map[string]bool{}
	for i := range setSpecs {
		ours[setSpecs[i].name] = r.state.layout.rules.has(&setSpecs[i])
	}
	for _, c := range r.state.classes.sorted() {
		for _, s := range c.limitSets() {
			ours[s.Name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.observed.sets)) {
		if !ours[name] && !r.observed.sets[name].anonymous {
			w.DeleteSet(name)
		}
	}
}

// removeChains deletes the chains that switchRules has emptied.
func (r *repair) removeChains(w *wire) {
	known := map[string]bool{}
	for _, c := range r.wanted() {
		known[c.name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(r.observed.chains)) {
		if !known[name] && !r.observed.chains[name].isBase {
			w.DeleteChain(name)
		}
	}
}
