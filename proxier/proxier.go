package proxier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/runner"
)

// Proxier is the Provider that all engines share.
type Proxier struct {
	config   Config
	log      *zap.Logger
	observer Observer
	health   Health
	settings Settings // nil: none
	asked    []*asked
	local    func(context.Context) ([]netip.Addr, error)
	without  []string // as in Status
	tracker  *changetracker.Tracker
	lent     *changetracker.Tracker // the same
	runner   *runner.Runner
	families []*family
	history  history
	created  time.Time
	logged   bool          // the first sync; guarded by syncing
	onlyNode chan struct{} // closed when the first sync waits for the node alone
	lonely   sync.Once     // closes onlyNode
	verifies exclusive     // held by Verify, before syncing
	syncing  exclusive     // held by a sync, by Cleanup and by Verify
	queued   atomic.Int64  // time of the last Trigger, in Unix nanoseconds
	awaited  atomic.Bool   // a call of Sync waits for the next sync

	mu           sync.Mutex // guards all below
	node         changetracker.Node
	nodeless     time.Time // since when nothing is known of the node on which the config depends; zero if it is
	serviceCIDRs []netip.Prefix
	ended        []Condition // of parts that have ended before Run
}

var _ Provider = (*Proxier)(nil)

// New returns a Proxier that drives one engine for each of the config's
// families. It starts nothing and writes nothing.
func New(config Config, deps Deps, engines map[v1.IPFamily]Engine) (*Proxier, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	p := &Proxier{config: config, created: time.Now(), observer: deps.Observer, local: deps.LocalAddresses, node: config.Node, onlyNode: make(chan struct{})}
	if config.lacks(config.Node) {
		p.nodeless = p.created
	}
	p.without = deps.without(&config)
	deps.Health = cmp.Or(deps.Health, NoHealth())
	deps.Logger = cmp.Or(deps.Logger, zap.NewNop())
	p.health, p.log = deps.Health, deps.Logger.With(zap.String("instance", config.Names.Instance))
	if p.settings = deps.Settings; p.settings != nil {
		p.asked = append(p.asked, &asked{find: p.settings.Apply, log: p.log, message: "kernel setting is not applied, will be retried"})
	}
	if deps.Surroundings != nil {
		find := func(ctx context.Context) []Condition {
			p.mu.Lock()
			node := p.node
			p.mu.Unlock()
			return deps.Surroundings(ctx, node)
		}
		p.asked = append(p.asked, &asked{find: find, log: p.log, message: "a setting of this node keeps packets of Services from arriving", always: true})
	}
	p.config.wrapEditSelection(p.log)
	var err error
	if p.tracker, err = changetracker.New(config.trackerOptions(p.log)); err != nil {
		return nil, fmt.Errorf("%w: Tracker: %w", ErrInvalidConfig, err)
	}
	p.lent = p.tracker.Lend()
	if p.runner, err = runner.New(config.runnerOptions(), p.sync); err != nil {
		return nil, fmt.Errorf("%w: Runner: %w", ErrInvalidConfig, err)
	}
	for _, name := range config.Families {
		engine := engines[name]
		if engine == nil {
			return nil, fmt.Errorf("%w: Families: no engine for %s", ErrInvalidConfig, name)
		}
		if deps.Wrap != nil {
			if engine, err = deps.Wrap(name, engine); err != nil {
				return nil, fmt.Errorf("wrap the engine of %s: %w", name, err)
			}
		}
		p.families = append(p.families, p.newFamily(name, engine, deps))
	}
	return p, nil
}

func (p *Proxier) newFamily(name v1.IPFamily, engine Engine, deps Deps) *family {
	f := &family{
		name:          name,
		config:        &p.config,
		log:           p.log.With(zap.String("family", string(name))),
		tracker:       p.tracker,
		engine:        engine,
		can:           engine.Abilities(),
		conntrack:     deps.Conntrack,
		health:        deps.Health,
		trigger:       p.Trigger,
		updater:       desired.NewUpdater(p.config.important()...),
		part:          changetracker.Part{Size: engine.Abilities().Part, First: p.config.important()},
		full:          true,
		moduleWaits:   maxModuleWaits,
		denied:        map[changetracker.ServicePortName]*desired.Service{},
		flows:         newFlowTracker(deps.Conntrack),
		ending:        newEndTracker(deps.Conntrack),
		announcements: newAnnouncements(deps.Announcer, name),
		counting:      newSharedReading(),
		ports:         newPorts(p.config.Runner.Retry),
		leaving:       leaving{},
	}
	f.traffic = p.config.CountTraffic && deps.Conntrack != nil && deps.Conntrack.RunTraffic != nil
	f.warnOfLocalhost()
	return f
}

// Run implements Provider.
func (p *Proxier) Run(ctx context.Context) error {
	for _, a := range p.asked {
		a.ask(ctx)
	}
	untilEnd, stop := context.WithCancel(ctx)
	defer stop()
	var running sync.WaitGroup
	for _, a := range p.asked {
		running.Go(func() { a.askAgain(untilEnd) })
	}
	for _, f := range p.families {
		if f.can.Watch != nil {
			running.Go(func() { f.watch(untilEnd) })
		}
	}
	running.Go(func() { p.goOnWithoutNode(untilEnd) })
	parts := parts{p: p, ctx: untilEnd}
	parts.run("serve health check node ports", func() error { return p.health.Run(untilEnd, p.Status) })
	if e := p.families[0].ending; e != nil {
		parts.run("end connections", func() error { return e.conntrack.RunEnding(untilEnd, p.log) })
	}
	if p.families[0].traffic {
		begun, begin := context.WithCancel(ctx)
		parts.run("count traffic", func() error { defer begin(); return p.families[0].conntrack.RunTraffic(untilEnd, p.log, begin) })
		<-begun.Done()
	}
	err := p.runner.Run(ctx)
	stop()
	running.Wait()
	err = errors.Join(err, parts.wait())
	p.endVerify(ctx)
	releaseNames(p.families) // before Close, in which engines may serve open connections for a while
	errs := make([]error, len(p.families))
	for i, f := range p.families {
		running.Go(func() { errs[i] = f.engine.Close() })
	}
	running.Wait()
	return errors.Join(append(errs, err)...)
}

// Trigger implements Provider.
func (p *Proxier) Trigger() {
	p.queued.Store(time.Now().UnixNano())
	p.runner.Trigger()
}

// Sync implements Provider.
func (p *Proxier) Sync(ctx context.Context) error {
	select {
	case <-p.tracker.Ready():
		called := time.Now()
		p.awaited.Store(true)
		err := p.runner.Sync(ctx)
		for err == nil && p.hasPending(called) {
			err = p.runner.Sync(ctx)
		}
		if err == nil && p.leavesFlows() {
			err = p.runner.Sync(ctx)
		}
		return err
	case <-p.runner.Done():
		return runner.ErrEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// hasPending reports whether a family has left changes for its next part that came before a time.
func (p *Proxier) hasPending(called time.Time) bool {
	return slices.ContainsFunc(p.families, func(f *family) bool {
		since := p.tracker.PendingSince(f.name)
		return !since.IsZero() && !since.After(called)
	})
}

// leavesFlows reports whether a family has left its search for flows for later. Then its next part does it.
func (p *Proxier) leavesFlows() (found bool) {
	for _, f := range p.families {
		if f.unclean.Load() {
			f.cleanNow.Store(true)
			found = true
		}
	}
	return found
}

// isReady reports whether everything is known that the first sync needs.
func (p *Proxier) isReady() bool { return isClosed(p.tracker.Ready()) }

// sync programs all families concurrently and independently. It returns when it wants to run again.
func (p *Proxier) sync(ctx context.Context) (next time.Time, err error) {
	if err := p.syncing.lock(ctx); err != nil {
		return time.Time{}, err
	}
	defer p.syncing.unlock()
	if !p.isReady() {
		return time.Time{}, nil
	}
	order := syncOrder{queued: time.Unix(0, p.queued.Load()), awaited: p.awaited.Swap(false)}
	p.mu.Lock()
	order.serviceCIDRs = p.serviceCIDRs
	p.mu.Unlock()
	order.lockErr = holdAllNames(p.families, false)
	wishes, errs := make([]time.Time, len(p.families)), make([]error, len(p.families))
	var anyFull atomic.Bool
	var running sync.WaitGroup
	for i, f := range p.families {
		running.Go(func() {
			var o *outcome
			if o, wishes[i], errs[i] = f.attempt(ctx, &order); o == nil {
				return
			}
			p.report(o)
			if o.programmed && o.Full {
				anyFull.Store(true)
			}
		})
	}
	running.Wait()
	if anyFull.Load() {
		p.logFirstSync()
	}
	for _, wish := range wishes {
		next = earliest(next, wish)
	}
	return next, errors.Join(errs...)
}

// report adds a sync to the history, and calls the observer.
func (p *Proxier) report(o *outcome) {
	o.Problems = problemCounts(p.tracker, p.families)
	if !errors.Is(o.Err, ErrContested) {
		p.history.add(o.SyncReport)
	}
	if p.observer != nil {
		p.observer.ObserveSync(o.SyncReport)
	}
}

// Cleanup implements Provider. A failure of one family does not stop the cleanup of the
// other.
func (p *Proxier) Cleanup(ctx context.Context) error {
	if err := p.syncing.lock(ctx); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	defer p.syncing.unlock()
	defer releaseNames(p.families)
	if err := holdAllNames(p.families, true); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	var errs []error
	for _, f := range p.families {
		f.full = true
		errs = append(errs, f.announcements.withdrawAll(ctx), f.ending.cleanup(ctx, f.name))
		if err := f.engine.Cleanup(ctx); err != nil {
			errs = append(errs, fmt.Errorf("clean up %s: %w", f.name, err))
		}
		errs = append(errs, f.engine.Close())
	}
	return errors.Join(append(errs, restore(ctx, p.settings))...)
}
