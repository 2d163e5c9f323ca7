package nftables

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// Engine programs one IP family over netlink; see the public package.
type Engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	open   func() (kernel, error)
	// listeners is shared by the engines of one Provider.
	listeners *listeners
	// holds is Behind.Holds; nil unless this engine is in front of another.
	holds func(netip.Addr) bool
	// behind are the traits of that engine.
	behind func(*desired.Service) desired.Traits
	// hash is hashUnknown, hashThere or hashMissing; Traits reads it beside Apply.
	hash atomic.Uint32
	// fast is whether the kernel has flowtables, with the same values.
	fast atomic.Uint32

	kernel kernel // nil until it is needed
	state  state
	// trusted means that state matches the kernel.
	trusted bool
	// failedRepairs counts the repairs of the table that failed in a row.
	failedRepairs int
	report        proxier.ApplyReport
	limited       []*proxier.ServiceError // Result.Limited of the current Apply
	left          []desired.Key           // Result.Left of the next Apply that succeeds
	loadWrites    int                     // how much is a load: the constant, but for tests
	loading       bool                    // listeners knows that much is being written
	counts        *counts                 // nil if connections are not counted
	counterLimit  uint32                  // of each set of counters: the constant, but for tests
	askFrom       int                     // how large a set is read by key: the constant, but for tests
	questions     []byte                  // memory that every query of askSet reuses
	batch         wire                    // memory that every batch reuses
	step          transaction             // memory that every step reuses
}

// state is the content of the kernel, as far as the engine knows.
type state struct {
	globals    desired.Globals
	layout     layout
	placed     map[changetracker.ServicePortName]*placed
	affinity   affinityIDs
	classes    *classTable
	frontends  frontendSets
	clusterIPs *refCounts[netip.Addr]
	hairpins   *refCounts[netip.Addr]
	// healthPorts and directVIPs are for a Front only.
	healthPorts *refCounts[uint16]
	directVIPs  *refCounts[desired.Key]
	// fastVIPs and fastNodePorts are those whose connections take the fast path.
	fastVIPs      *refCounts[desired.Key]
	fastNodePorts *refCounts[fastNodePort]
}

// flushCounts writes the changes of the shared sets.
func (s *state) flushCounts(sink elementSink) {
	s.frontends.flush(sink, false)
	s.clusterIPs.flush(sink)
	s.hairpins.flush(sink)
	s.healthPorts.flush(sink)
	s.directVIPs.flush(sink)
	s.fastVIPs.flush(sink)
	s.fastNodePorts.flush(sink)
}

// NewEngine returns the engine of one family.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	var counts *counts
	if config.CountConnections {
		counts = newCounts()
	}
	return &Engine{
		config: config,
		counts: counts,
		family: family,
		log:    lightdeps.Logger(deps.Logger, "nftables", family),
		open: func() (kernel, error) {
			s, err := openSocket(config.NetNS)
			if err != nil {
				return nil, err
			}
			return s, nil
		},
		listeners:    newListeners(),
		loadWrites:   loadWrites,
		counterLimit: counterLimit,
		askFrom:      askFrom,
		batch:        wire{family: netfilterFamily(family), table: config.Names.Table},
	}, nil
}

// New returns a Provider with an engine for each family. They share their listeners.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	deps = nodedeps.Complete(config.Config, deps)
	shared := newListeners()
	return lightdeps.Provider(config.Config, deps, func(family v1.IPFamily) (*Engine, error) {
		engine, err := NewEngine(config, family, deps)
		if engine != nil {
			engine.listeners = shared
		}
		return engine, err
	})
}

func netfilterFamily(family v1.IPFamily) uint8 {
	if family == v1.IPv4Protocol {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

// errNotFull is a bug of the caller: the first Update, the one after a failure, and the one
// after a change of pod detection must be full.
var errNotFull = errors.New("nftables: a full update is needed, got a partial one")

// Apply implements proxier.Engine.
func (e *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	defer e.counts.lock()()
	e.counts.forgetLate()
	e.report = proxier.ApplyReport{}
	err := e.apply(ctx, update)
	// The kernel did not know an expression of a rule and knows all of them now: modules were loading,
	// perhaps for the other family or another process. Each rule may wait for another module.
	var refused []string
	for update.Full && isUnknown(err) && !errors.Is(err, proxier.ErrNotSupported) && !slices.Contains(refused, refusedObject(err)) {
		refused = append(refused, refusedObject(err))
		err = e.apply(ctx, update)
	}
	result := proxier.Result{Report: e.report, Left: e.left, Limited: e.limited}
	if err == nil {
		e.left = nil
	}
	return result, err
}

func (e *Engine) apply(ctx context.Context, update desired.Update) error {
	if err := e.connect(); err != nil {
		return err
	}
	trusted := e.trusted
	e.trusted, e.limited = false, nil // unless all goes well
	err := errors.Join(e.findHash(ctx, &update), e.findCounters(ctx, &update), e.findFlowtables(ctx, &update))
	switch {
	case err != nil:
	case update.Full:
		err = e.applyFull(ctx, update, trusted)
	case trusted:
		err = e.applyChanges(ctx, update)
	default:
		err = errNotFull
	}
	err = errors.Join(err, e.endLoad(ctx, err))
	if err != nil {
		// The kernel may still send answers to the failed transaction: a new socket does
		// not receive them.
		return e.explainRule(ctx, errors.Join(err, e.Close()))
	}
	if e.counting() {
		e.counts.ledger.Applied(&update)
	}
	e.trusted, e.failedRepairs = true, 0
	if update.Full {
		e.syncDevices(ctx)
	}
	return nil
}

// beginLoad pauses the listeners.
func (e *Engine) beginLoad(ctx context.Context) error {
	if e.loading {
		return nil
	}
	e.loading = true
	return e.listeners.beginLoad(func() (uint32, error) { return e.generation(ctx) })
}

// endLoad resumes the listeners, if they paused.
func (e *Engine) endLoad(ctx context.Context, outcome error) error {
	if !e.loading {
		return nil
	}
	e.loading = false
	var failed uint8
	if outcome != nil {
		failed = e.batch.family
	}
	return e.listeners.endLoad(failed, func() (uint32, error) { return e.generation(ctx) })
}

// generation returns the number of transactions in the network namespace so far.
func (e *Engine) generation(ctx context.Context) (uint32, error) {
	return e.generationFrom(ctx, e.kernel)
}

func (e *Engine) generationFrom(ctx context.Context, k kernel) (uint32, error) {
	w := &wire{family: e.batch.family, table: e.batch.table}
	w.begin(msgGetGen, unix.NLM_F_ACK, "get", "generation")
	w.end()
	var id uint32
	err := k.dump(ctx, w, func() {}, func(attrs []byte) { id = netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_GEN_ID)) })
	return id, err
}

// Abilities implements proxier.Engine.
func (e *Engine) Abilities() proxier.Abilities {
	return proxier.Abilities{OwnsNames: true, Watch: e.Watch, Plan: e.Plan, Dump: e.Dump, Counts: e.Counts, Verify: e.Verify}
}

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

// Cleanup implements proxier.Engine.
func (e *Engine) Cleanup(ctx context.Context) error {
	err := e.connect()
	if errors.Is(err, proxier.ErrNotSupported) {
		return nil // without nf_tables there are no tables
	}
	if err != nil {
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
	e.kernel = &timedKernel{kernel: k, waited: &e.report.Kernel}
	return e.listeners.writesFrom(writer{engine: e}, k.port())
}

// layoutFor returns the layout for these globals.
func (e *Engine) layoutFor(g *desired.Globals) layout {
	return layout{
		dnatPriority: e.config.DNATPriority,
		snatPriority: e.config.SNATPriority,
		rules: rules{
			v6:           e.family == v1.IPv6Protocol,
			mark:         e.config.Masquerade.Mark,
			detectsPods:  g.DetectsPods(),
			podInterface: g.PodInterface,
			inFront:      e.holds != nil,
			counts:       e.counting() && e.holds == nil,
			fastAfter:    e.fastAfter(),
		},
	}
}
