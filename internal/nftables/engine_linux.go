package nftables

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/node/nodedeps"
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
	// fast is whether the kernel has flowtables, and limits whether it limits clients, with the same values.
	fast, limits atomic.Uint32
	// asksForLimits is whether the table limits clients: see findLimits.
	asksForLimits bool

	// mu is held by Apply and Cleanup, so that state and kernel agree. It guards what others read of the fields below: checks,
	// Counts, and what reads ahead.
	mu     sync.Mutex
	kernel kernel // nil until it is needed
	state  state
	// trusted means that state matches the kernel.
	trusted bool
	// fullUpdates counts them from their begin on, and clean-ups.
	fullUpdates atomic.Uint64
	// failedRepairs counts the repairs of the table that failed in a row.
	failedRepairs int
	report        proxier.ApplyReport
	limited       []*proxier.ServiceError // Result.Limited of the current Apply
	left          []desired.Key           // Result.Left of the next Apply that succeeds
	loadWrites    int                     // how much is a load: the constant, but for tests
	stepElements  int                     // how large a step is: the constant, but for tests
	loading       bool                    // listeners knows that much is being written
	counts        *counts                 // nil if connections are not counted
	counterLimit  uint32                  // of each set of counters: the constant, but for tests
	askFrom       int                     // how large a set is read by key: the constant, but for tests
	ahead         *ahead                  // for the first full update
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
	s.frontends.flush(sink)
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
			s, err := nft.Dial(config.NetNS)
			if err != nil {
				return nil, err
			}
			return s, nil
		},
		listeners:    newListeners(),
		loadWrites:   loadWrites,
		stepElements: stepElements,
		counterLimit: counterLimit,
		askFrom:      askFrom,
		batch:        *newWire(netfilterFamily(family), config.Names.Table),
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

// generation returns the number of transactions in the network namespace so far.
func (e *Engine) generation(ctx context.Context) (uint32, error) {
	return e.generationFrom(ctx, e.kernel)
}

func (e *Engine) generationFrom(ctx context.Context, k kernel) (uint32, error) {
	w := newWire(e.batch.Family, e.batch.Table)
	w.Start(unix.NFT_MSG_GETGEN, unix.NLM_F_ACK, "get", "generation")
	w.End()
	var id uint32
	err := k.Dump(ctx, &w.Batch, func() {}, func(attrs []byte) { id = netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_GEN_ID)) })
	return id, err
}

// PartSize is how many service ports an Update should have: BenchmarkStalls measures how long a small change waits for a part
// of a large one.
const PartSize = 1000

// Abilities implements proxier.Engine.
func (e *Engine) Abilities() proxier.Abilities {
	return proxier.Abilities{OwnsNames: true, Part: PartSize, Watch: e.Watch, Plan: e.Plan, Dump: e.Dump, Counts: e.Counts, Verify: e.Verify}
}

// Close closes the netlink socket. The kernel objects stay. A later call opens a
// new socket.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.disconnect()
}

func (e *Engine) disconnect() error {
	if e.kernel == nil {
		return nil
	}
	err := e.kernel.Close()
	e.kernel, e.trusted = nil, false
	return err
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
	return e.listeners.writesFrom(writer{engine: e}, k.Port())
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
			limits:       e.asksForLimits,
		},
	}
}

// Traits implements proxier.Engine. They depend on the kernel, once a service port has asked for
// a consistent hash.
func (e *Engine) Traits(*desired.Service) desired.Traits {
	return desired.Traits{
		NoHash: e.hash.Load() == hashMissing, FastPath: e.fastAfter() > 0, ClosedLoadBalancerIPs: e.config.CloseLoadBalancerIPs,
		ClientLimits: e.limitsClients(),
	}
}

// traitsOf are the traits for the packets of a service port, which the engine behind may translate.
func (e *Engine) traitsOf(s *desired.Service) desired.Traits {
	t := e.Traits(s)
	refused := s.Name.Namespace == "" // see refusedName
	t.DirectReturn = e.behind != nil && !refused && e.behind(s).DirectReturn
	return t
}
