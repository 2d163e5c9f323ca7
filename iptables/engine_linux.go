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

// engine programs one IP family.
type engine struct {
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

// NewEngine returns the engine of one family. It runs no program and writes nothing before the first Apply.
// Close stops watching; the rules stay.
//
// Plan returns the input of iptables-restore that programs the update from scratch. Dump prints the instance's
// chains, and the rules that jump to them, in the format of iptables-save. Verify compares the output of
// iptables-save with the chains that a new engine would write, and the jumps to them in built-in chains. A chain
// of ours that is empty may be there if a chain of another program jumps to it. Watch checks the tables every
// second and after each write. Counts reads the counters of the rules; a sync waits for it.
//
// Cleanup cleans both variants, because a predecessor may have used the other one. A chain of the instance that
// another program's chain jumps to is flushed and stays. The rule that keeps other hosts from loopback addresses
// stays while route_localnet is 1, if this instance did not set it.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
	e, err := newEngine(config, family, deps)
	if err != nil {
		return nil, err
	}
	return e, nil
}

func newEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	log := lightdeps.Logger(deps.Logger, "iptables", family)
	e := &engine{
		config: config, family: family, log: log, written: make(chan struct{}, 1), watchPeriod: watchPeriod,
		totals:   newTotals(config.CountConnections),
		localnet: localnet{netNS: config.NetNS, log: log},
	}
	e.open = func(ctx context.Context) (kernel, error) { return openTool(ctx, e.toolConfig(config.Variant)) }
	return e, nil
}

func (e *engine) toolConfig(v Variant) toolConfig {
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
	return lightdeps.Provider(config.Config, deps, func(family v1.IPFamily) (*engine, error) { return newEngine(config, family, deps) })
}

// Traits implements proxier.Engine.
func (e *engine) Traits(*desired.Service) desired.Traits {
	return desired.Traits{ServiceIPsPass: true, LoopbackNodePorts: e.config.RouteLocalnet, NoHash: true}
}

// Abilities implements proxier.Engine.
func (e *engine) Abilities() proxier.Abilities {
	return proxier.Abilities{OwnsNames: true, Watch: e.Watch, Plan: e.Plan, Dump: e.Dump, Counts: e.Counts, Verify: e.Verify}
}

// Close stops watching. The rules stay, and the next Apply must be full.
func (e *engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.kernel, e.trusted = nil, false
	return e.guard.close()
}

func (e *engine) connect(ctx context.Context) error {
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
