package nftables

import (
	"context"
	"maps"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// mender brings a table of ours to what it should be while packets go through it:
// one that another process left, one of another version or configuration, or one
// that somebody else has damaged. It never empties anything that is in use, so
// that no connection fails meanwhile and session affinity lasts.
type mender struct {
	*Engine
	observed *observation
	rest     reconciler
	// newSets says that sets were missing. The rules then come after the elements;
	// otherwise they come first, because damage to them hurts most.
	newSets bool
}

// mend goes from what is missing to what is too much.
func (e *Engine) mend(
	ctx context.Context, update desired.Update, o *observation, hints map[changetracker.ServicePortName]*placed,
) error {
	m := &mender{Engine: e, observed: o, rest: reconciler{t: &e.step, have: &o.element}}
	if err := m.createSets(ctx); err != nil {
		return err
	}
	if err := e.observeVerdicts(ctx, o); err != nil {
		return err
	}
	m.adoptClasses()
	if err := m.createChains(ctx); err != nil {
		return err
	}
	if !m.newSets {
		if err := m.switchRules(ctx); err != nil {
			return err
		}
	}
	if err := e.observeElements(ctx, o); err != nil {
		return err
	}
	if len(hints) == 0 {
		hints = e.adoptAll(&update, o)
	}
	e.state.globals = o.globals(&update.Globals)
	if err := e.writeAll(ctx, update, &m.rest, hints); err != nil {
		return err
	}
	if m.newSets {
		if err := m.switchRules(ctx); err != nil {
			return err
		}
	}
	return m.removeRest(ctx)
}

// createSets creates the sets that the table does not have.
func (m *mender) createSets(ctx context.Context) error {
	w := m.newBatch()
	empty := len(w.messages)
	for i := range setSpecs {
		if _, ok := m.observed.sets[setSpecs[i].name]; !ok {
			w.newSet(&setSpecs[i], m.addrLen(), m.setSize(&setSpecs[i]))
		}
	}
	m.newSets = len(w.messages) > empty
	return m.sendUnless(ctx, w, empty)
}

// sendUnless sends a batch that holds more messages than an empty one.
func (m *mender) sendUnless(ctx context.Context, w *wire, empty int) error {
	writes := len(w.messages) - empty
	if writes == 0 {
		return nil
	}
	m.report.Writes += writes
	return m.send(ctx, w)
}

// adoptClasses takes over the classes in the kernel.
func (m *mender) adoptClasses() {
	for _, elements := range m.observed.verdict {
		for id, chain := range elements {
			if c, ok := parseClass(chain); ok && uint32(c) == id {
				m.state.classes.adopt(c)
			}
		}
	}
}

// wanted are the chains that there must be at the moment.
func (m *mender) wanted() []chainSpec {
	specs := m.state.layout.chains()
	for _, c := range m.state.classes.sorted() {
		specs = append(specs, m.state.layout.classChain(c))
	}
	return specs
}

// createChains creates the chains that are missing, and leads the classes to theirs:
// the rules of a predecessor may send packets there before ours do. Base chains wait.
func (m *mender) createChains(ctx context.Context) error {
	w := m.newBatch()
	empty := len(w.messages)
	var missing []chainSpec
	for _, c := range m.wanted() {
		if m.observed.chains[c.name] == nil && c.hook == nil {
			missing = append(missing, c)
			sums, err := c.checksums(m.state.layout.family())
			if err != nil {
				return err
			}
			m.observed.chains[c.name] = &observedChain{rules: sums}
		}
	}
	if err := w.chains(missing); err != nil {
		return err
	}
	wanted := wantedVerdicts(m.state.classes.sorted())
	for id := range wanted {
		have := m.observed.verdict[id]
		for _, class := range slices.Sorted(maps.Keys(wanted[id])) {
			chain, ok := have[class]
			if ok && chain == wanted[id][class] {
				continue
			}
			if ok {
				w.deleteMark(&setSpecs[id], class)
			}
			w.verdictElement(&setSpecs[id], class, wanted[id][class])
		}
	}
	return m.sendUnless(ctx, w, empty)
}

// wantedVerdicts are the elements of the verdict maps.
func wantedVerdicts(classes []class) (want [numSets]map[uint32]string) {
	add := func(in setID, class uint32, chain string) {
		if want[in] == nil {
			want[in] = map[uint32]string{}
		}
		want[in][class] = chain
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

// switchRules puts all rules right that are not, in one transaction: a packet
// meets the old ones or the new ones. Base chains change hook, priority or version
// by being replaced.
func (m *mender) switchRules(ctx context.Context) error {
	w := m.newBatch()
	empty := len(w.messages)
	if m.observed.dormant {
		w.wakeTable()
	}
	wanted := m.wanted()
	known := map[string]bool{}
	var wrong []chainSpec
	for i := range wanted {
		known[wanted[i].name] = true
		ok, err := m.observed.hasChain(&wanted[i], &m.state.layout)
		if err != nil {
			return err
		}
		if !ok {
			wrong = append(wrong, wanted[i])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.observed.chains)) {
		if !known[name] {
			w.empty(name, m.observed.chains[name])
		}
	}
	for _, c := range wrong {
		w.empty(c.name, m.observed.chains[c.name])
	}
	if err := w.chains(wrong); err != nil {
		return err
	}
	return m.sendUnless(ctx, w, empty)
}

// empty takes the rules out of a chain, and removes it if it is a base chain.
func (w *wire) empty(name string, c *observedChain) {
	if c == nil {
		return
	}
	if len(c.rules) > 0 {
		w.flushChain(name)
	}
	if c.isBase {
		w.deleteChain(name)
	}
}

// removeRest deletes what nothing asked for: elements, then what leads to chains,
// then chains. Each kind has a transaction of its own, because kernels before 6.2
// still count what is deleted in the same one as a user of the next.
func (m *mender) removeRest(ctx context.Context) error {
	if err := m.removeElements(ctx); err != nil {
		return err
	}
	for _, remove := range []func(*wire){m.removeVerdicts, m.removeSets, m.removeChains} {
		w := m.newBatch()
		empty := len(w.messages)
		remove(w)
		if err := m.sendUnless(ctx, w, empty); err != nil {
			return err
		}
	}
	return m.removeUnusedClasses(ctx)
}

// removeElements deletes, in steps, the elements that no service port asked for.
func (m *mender) removeElements(ctx context.Context) error {
	t := m.rest.t
	for id := range m.observed.element {
		keyLen := padded(setSpecs[id].key, m.addrLen())
		for key := range m.observed.element[id] {
			t.remove(setID(id), elementOf(key[:keyLen]), elementOf(key[keyLen:]))
			if t.elements < stepElements {
				continue
			}
			if err := m.commit(ctx, t, nil); err != nil {
				return err
			}
		}
	}
	return m.commit(ctx, t, nil)
}

func elementOf(b string) elementBytes {
	var e elementBytes
	e.n = uint8(copy(e.buf[:], b))
	return e
}

func (m *mender) removeVerdicts(w *wire) {
	wanted := wantedVerdicts(m.state.classes.sorted())
	for id, have := range m.observed.verdict {
		for _, class := range slices.Sorted(maps.Keys(have)) {
			if _, ok := wanted[id][class]; !ok {
				w.deleteMark(&setSpecs[id], class)
			}
		}
	}
}

func (m *mender) removeSets(w *wire) {
	ours := map[string]bool{}
	for i := range setSpecs {
		ours[setSpecs[i].name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(m.observed.sets)) {
		if !ours[name] && !m.observed.sets[name].anonymous {
			w.deleteSet(name)
		}
	}
}

// removeChains deletes the chains that switchRules has emptied.
func (m *mender) removeChains(w *wire) {
	known := map[string]bool{}
	for _, c := range m.wanted() {
		known[c.name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(m.observed.chains)) {
		if !known[name] && !m.observed.chains[name].isBase {
			w.deleteChain(name)
		}
	}
}
