package iptables

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// Engine programs one IP family. It implements proxier.Engine, Planner, Dumper, Verifier,
// Watcher and Counter. Calls must not overlap, but Watch, Counts and Traits run beside all others.
type Engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	open   func(ctx context.Context) (kernel, error)
	// written wakes Watch after a write; otherwise Watch checks every watchPeriod.
	written     chan struct{}
	watchPeriod time.Duration

	mu     sync.Mutex // held while the tables are written; guards all below
	kernel kernel     // nil until it is needed
	model  *model
	have   map[string]ruleset // the instance's chains in the kernel, if trusted
	jumps  map[string]ruleset // from built-in chains to those, likewise
	rules  map[string]int     // the number of the instance's rules by table
	// trusted means that have, jumps and rules are what the kernel holds.
	trusted bool
	// updated are the service ports that the current update sets.
	updated map[changetracker.ServicePortName]step
	refused []*proxier.ServiceError // in the current update
	// counts means that rules can count by nfacct.
	counts   bool
	totals   *totals // of new connections; nil if they are not counted
	report   proxier.ApplyReport
	left     []desired.Key // Result.Left of the next Apply that succeeds
	guard    guard
	localnet localnet
}

// step is the plan of a service port before and after an update.
type step struct{ before, after *portPlan }

// NewEngine returns the engine of one family. It runs no program and writes nothing
// before the first Apply.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	log := lightdeps.Logger(deps.Logger, "iptables", family)
	e := &Engine{
		config: config, family: family, log: log, written: make(chan struct{}, 1), watchPeriod: watchPeriod,
		totals:   newTotals(config.CountConnections),
		localnet: localnet{netNS: config.NetNS, log: log},
	}
	e.open = func(ctx context.Context) (kernel, error) { return openTool(ctx, e.toolConfig(config.Variant)) }
	return e, nil
}

func (e *Engine) toolConfig(v Variant) toolConfig {
	return toolConfig{
		family: e.family, netNS: e.config.NetNS, names: e.config.chains(), variant: v, lockWait: e.config.LockWait, timeout: e.config.Timeout, log: e.log,
		counting: e.config.CountConnections,
	}
}

// New returns a Provider with an iptables engine for each family of the config. Unless
// deps say otherwise, it also deletes stale UDP flows and serves health check node ports.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	deps = nodedeps.Complete(config.Config, deps)
	return lightdeps.Provider(config.Config, deps, func(family v1.IPFamily) (*Engine, error) { return NewEngine(config, family, deps) })
}

// Traits implements proxier.Engine.
func (e *Engine) Traits(*desired.Service) desired.Traits {
	return desired.Traits{ServiceIPsPass: true, LoopbackNodePorts: e.config.LocalhostNodePorts, NoHash: true}
}

// Abilities implements proxier.Engine.
func (e *Engine) Abilities() proxier.Abilities {
	return proxier.Abilities{OwnsNames: true, Watch: e.Watch, Plan: e.Plan, Dump: e.Dump, Counts: e.Counts, Verify: e.Verify}
}

// Close stops watching. The rules stay, and the next Apply must be full.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.kernel, e.trusted = nil, false
	return e.guard.close()
}

func (e *Engine) connect(ctx context.Context) error {
	if e.kernel != nil {
		return nil
	}
	k, err := e.open(ctx)
	if err != nil {
		return err
	}
	w, err := k.watcher(e.config.chains().owns)
	if err != nil {
		return watchError(err)
	}
	e.guard.watcher = w
	e.counts = e.ensureCounters(ctx, k)
	e.kernel = &timedKernel{kernel: k, spent: &e.report.Kernel}
	return nil
}
