package nftables

import (
	"context"
	"errors"
	"slices"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// stepElements is how many element writes one transaction holds at most, give or
// take one service port: nobody else in the network namespace can commit
// meanwhile, and this many take a few milliseconds.
const stepElements = 2000

// Engine programs one IP family by netlink. It implements proxier.Engine,
// Planner, Dumper and Reporter. Calls must not overlap.
type Engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	specs  []setSpec
	open   func() (kernel, error)

	kernel kernel // nil until it is needed
	state  state
	// trusted says that state is what the kernel holds.
	trusted bool
	report  proxier.ApplyReport
	batch   wire        // memory that every batch reuses
	step    transaction // memory that every step reuses
}

// state is what the engine believes to be in the kernel.
type state struct {
	globals    desired.Globals
	layout     layout
	placed     map[changetracker.ServicePortName]*placed
	affinity   affinityIDs
	classes    *classTable
	clusterIPs *refCounts
	hairpins   *refCounts
}

// NewEngine returns the engine of one family. It opens no socket and writes
// nothing before the first Apply.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
	return newEngine(config, family, deps)
}

func newEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	log := deps.Logger
	if log == nil {
		log = zap.NewNop()
	}
	specs := setSpecs()
	return &Engine{
		config: config,
		family: family,
		log:    log.Named("nftables").With(zap.String("family", string(family))),
		specs:  specs,
		open:   func() (kernel, error) { return openSocket(config.NetNS) },
		batch:  wire{family: netfilterFamily(family), table: config.Names.Table},
		step:   transaction{specs: specs},
	}, nil
}

// New returns a Provider with an nftables engine for each family of the config.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range config.Families {
		engine, err := newEngine(config, family, deps)
		if err != nil {
			return nil, err
		}
		engines[family] = engine
	}
	return proxier.New(config.Config, deps, engines)
}

func netfilterFamily(family v1.IPFamily) uint8 {
	if family == v1.IPv4Protocol {
		return familyIPv4
	}
	return familyIPv6
}

// errNotFull is a bug of the caller: it must send a full Update first, and after
// every failure.
var errNotFull = errors.New("nftables: partial update of an unknown state")

// Apply implements proxier.Engine.
func (e *Engine) Apply(ctx context.Context, update desired.Update) error {
	e.report = proxier.ApplyReport{}
	if err := e.connect(); err != nil {
		return err
	}
	trusted := e.trusted
	e.trusted = false // unless all goes well
	var err error
	switch {
	case update.Full:
		err = e.applyFull(ctx, update, trusted)
	case trusted:
		err = e.applyChanges(ctx, update)
	default:
		err = errNotFull
	}
	e.trusted = err == nil
	return err
}

// LastApply implements proxier.Reporter.
func (e *Engine) LastApply() proxier.ApplyReport { return e.report }

// Close closes the netlink socket. The kernel objects stay. A later call opens a
// new socket.
func (e *Engine) Close() error {
	if e.kernel == nil {
		return nil
	}
	err := e.kernel.close()
	e.kernel, e.trusted = nil, false
	return err
}

// Cleanup implements proxier.Engine: it deletes the table.
func (e *Engine) Cleanup(ctx context.Context) error {
	if err := e.connect(); err != nil {
		return err
	}
	e.trusted = false
	w := e.newBatch()
	w.deleteTable()
	if err := e.send(ctx, w); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

func (e *Engine) connect() error {
	if e.kernel != nil {
		return nil
	}
	k, err := e.open()
	if err != nil {
		return err
	}
	e.kernel = k
	return nil
}

// applyChanges writes the difference that the update makes to each of its service
// ports.
func (e *Engine) applyChanges(ctx context.Context, update desired.Update) error {
	t := e.beginStep()
	for _, name := range update.Removed {
		e.change(t, name, nil)
	}
	for _, s := range update.Services {
		e.change(t, s.Name, s)
		if t.elements >= stepElements {
			if err := e.commit(ctx, t, nil); err != nil {
				return err
			}
		}
	}
	return e.commit(ctx, t, e.changedGlobals(&update.Globals))
}

// change notes the difference between what is placed for a service port and what
// must be; s is nil when it is gone.
func (e *Engine) change(t *transaction, name changetracker.ServicePortName, s *desired.Service) {
	prev := e.state.placed[name]
	var next *placed
	if s != nil {
		next = e.place(prev, s, t)
		e.state.placed[name] = next
	} else {
		delete(e.state.placed, name)
		e.state.affinity.release(name)
	}
	diff(t, prev, next)
	e.state.count(prev, -1)
	e.state.count(next, 1)
}

// place works out where a service port stands in the sets. New classes are noted
// in t.
func (e *Engine) place(prev *placed, s *desired.Service, t *transaction) *placed {
	pl := placer{class: func(f forwarding) uint32 { return e.state.classes.class(f, t) }}
	if s.Affinity > 0 {
		pl.affinity, _ = e.state.affinity.service(s.Name)
	}
	if pl.affinity == nil {
		if s.Affinity > 0 {
			e.log.Warn("no affinity ids left, session affinity is off", zap.Stringer("service", s.Name))
		}
		e.state.affinity.release(s.Name)
		plain := *s
		plain.Affinity = 0
		s = &plain
	}
	if most := pl.limit(); len(s.Cluster) > most || len(s.Local) > most {
		e.log.Warn("too many endpoints, the rest gets no traffic", zap.Stringer("service", s.Name), zap.Int("limit", most))
	}
	return pl.place(prev, s)
}

// count adds what a service port needs of the shared sets.
func (s *state) count(p *placed, n int) {
	if p == nil {
		return
	}
	for i := range p.frontends {
		if p.frontends[i].clusterIP {
			s.clusterIPs.add(p.frontends[i].key.VIP, n)
		}
	}
	for _, a := range p.hairpin {
		s.hairpins.add(a, n)
	}
}

func (e *Engine) beginStep() *transaction {
	e.step.reset()
	return &e.step
}

// changedGlobals returns a writer of what differs from the globals in the kernel,
// nil if nothing does.
func (e *Engine) changedGlobals(want *desired.Globals) func(w *wire) {
	var changed []setID
	for _, id := range intervalSets() {
		if !slices.Equal(prefixesOf(want, id), prefixesOf(&e.state.globals, id)) {
			changed = append(changed, id)
		}
	}
	if len(changed) == 0 {
		return nil
	}
	return func(w *wire) {
		for _, id := range changed {
			w.replaceIntervals(&e.specs[id], ranges(prefixesOf(want, id)))
			e.report.Writes++
		}
		e.state.globals = *want
	}
}

// commit writes a step as one transaction, with more after it, and empties it.
// Nothing is sent when there is nothing to write.
func (e *Engine) commit(ctx context.Context, t *transaction, more func(*wire)) error {
	e.state.clusterIPs.settle(t)
	e.state.hairpins.settle(t)
	if t.empty() && more == nil {
		return nil
	}
	w := e.newBatch()
	if err := e.writeStep(w, t, more); err != nil {
		return err
	}
	t.reset()
	return e.send(ctx, w)
}

func (e *Engine) writeStep(w *wire, t *transaction, more func(*wire)) error {
	for _, c := range t.classes {
		if err := e.writeClass(w, c); err != nil {
			return err
		}
	}
	t.write(w)
	e.report.Writes += t.elements
	if more != nil {
		more(w)
	}
	return nil
}

// writeClass creates the chain of a class, the chains it shares unless they
// exist, and its elements in the verdict maps.
func (e *Engine) writeClass(w *wire, c newClass) error {
	var missing []chainSpec
	for _, chain := range e.state.layout.forwardingChains(c.forwarding) {
		if !e.state.classes.chains[chain.name] {
			e.state.classes.chains[chain.name] = true
			missing = append(missing, chain)
		}
	}
	e.report.Writes += len(missing)
	if err := w.chains(missing); err != nil {
		return err
	}
	for _, in := range c.reachedFrom() {
		w.verdictElement(&e.specs[in], c.id, c.chain())
		e.report.Writes++
	}
	return nil
}

func (e *Engine) newBatch() *wire {
	e.batch.buf, e.batch.messages = e.batch.buf[:0], e.batch.messages[:0]
	e.batch.batchMarker(nfnlBatchBegin)
	return &e.batch
}

func (e *Engine) send(ctx context.Context, w *wire) error {
	w.batchMarker(nfnlBatchEnd)
	e.report.Transactions++
	e.report.Bytes += len(w.buf)
	return e.kernel.commit(ctx, w)
}

// layoutFor returns the layout that suits the globals.
func (e *Engine) layoutFor(g *desired.Globals) layout {
	return layout{
		dnatPriority: e.config.DNATPriority,
		snatPriority: e.config.SNATPriority,
		rules: rules{
			v6:           e.family == v1.IPv6Protocol,
			mark:         e.config.Masquerade.Mark,
			detectsPods:  g.DetectsPods(),
			podInterface: g.PodInterface,
			specs:        e.specs,
		},
	}
}
