package proxier

import (
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
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/runner"
)

// Proxier is the Provider that all engines share.
type Proxier struct {
	config    Config
	log       *zap.Logger
	observer  Observer
	conntrack Conntrack
	health    Health
	settings  Settings
	announcer Announcer
	local     func(context.Context) ([]netip.Addr, error)
	without   []string // as in Status
	tracker   *changetracker.Tracker
	runner    *runner.Runner
	families  []*family
	syncing   sync.Mutex   // held by a sync and by Cleanup
	queued    atomic.Int64 // when a sync was asked for last, in Unix nanoseconds

	mu                sync.Mutex // guards all below
	node              changetracker.Node
	settingConditions []Condition
	fullDone          bool // there was a full sync since the settings were tried
	history           history
	serviceCIDRs      []netip.Prefix
}

var _ Provider = (*Proxier)(nil)

// New returns a Proxier that drives one engine for each of the config's
// families. It starts nothing and writes nothing.
func New(config Config, deps Deps, engines map[v1.IPFamily]Engine) (*Proxier, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	p := &Proxier{
		config:    config,
		log:       deps.Logger,
		observer:  deps.Observer,
		conntrack: deps.Conntrack,
		health:    deps.Health,
		settings:  deps.Settings,
		announcer: deps.Announcer,
		local:     deps.LocalAddresses,
		node:      config.Node,
	}
	if p.conntrack == nil {
		p.without = append(p.without, "Conntrack")
	}
	if p.health == nil {
		p.without = append(p.without, "Health")
		p.health = NoHealth()
	}
	if p.log == nil {
		p.log = zap.NewNop()
	}
	p.log = p.log.With(zap.String("instance", config.Names.Instance))
	p.config.wrapEditSelection(p.log)
	options := config.Tracker
	options.Families, options.Node, options.Logger = config.Families, config.Node, p.log
	options.AwaitNode = options.AwaitNode || config.lacksNode()
	options.ExternalIPs.Denied = slices.Concat(options.ExternalIPs.Denied, config.Masquerade.PodCIDRs)
	var err error
	if p.tracker, err = changetracker.New(options); err != nil {
		return nil, fmt.Errorf("%w: Tracker: %w", ErrInvalidConfig, err)
	}
	if p.runner, err = runner.New(config.runnerOptions(), p.sync); err != nil {
		return nil, fmt.Errorf("%w: Runner: %w", ErrInvalidConfig, err)
	}
	for _, name := range config.Families {
		engine := engines[name]
		if engine == nil {
			return nil, fmt.Errorf("%w: Families: no engine for %s", ErrInvalidConfig, name)
		}
		f := p.newFamily(name, engine)
		f.warnOfHidden()
		p.families = append(p.families, f)
	}
	return p, nil
}

func (p *Proxier) newFamily(name v1.IPFamily, engine Engine) *family {
	repair := time.AfterFunc(longestPause, p.Trigger)
	repair.Stop()
	return &family{
		repair:         repair,
		trigger:        p.Trigger,
		again:          map[changetracker.ServicePortName]bool{},
		name:           name,
		engine:         engine,
		updater:        desired.NewUpdater(p.config.important()...),
		denied:         map[changetracker.ServicePortName]*desired.Service{},
		log:            p.log.With(zap.String("family", string(name))),
		full:           true,
		period:         p.config.FullSyncPeriod,
		loadingRetries: maxLoadingRetries,
		conntrack:      p.conntrack,
		flows:          newFlowTracker(p.conntrack),
		announcements:  newAnnouncements(p.announcer, name),
	}
}

// runnerOptions lets a sync happen at least once per full-sync period.
func (c *Config) runnerOptions() runner.Options {
	o := c.Runner
	if o.MaxInterval < 0 || o.MaxInterval > c.FullSyncPeriod {
		o.MaxInterval = c.FullSyncPeriod
	}
	return o
}

// lacksNode says that the configuration depends on a node of which nothing is known, but
// its name at most.
func (c *Config) lacksNode() bool {
	return (c.NodePorts.Primary || c.Masquerade.NodePodCIDRs) && len(c.Node.Addresses)+len(c.Node.PodCIDRs) == 0
}

// important are the Services that are programmed before all others.
func (c *Config) important() []types.NamespacedName {
	return append([]types.NamespacedName{
		{Namespace: "default", Name: "kubernetes"},
		{Namespace: "kube-system", Name: "kube-dns"},
	}, c.Important...)
}

// OnServiceAdd implements Provider.
func (p *Proxier) OnServiceAdd(service *v1.Service) { p.OnServiceUpdate(nil, service) }

// OnServiceUpdate implements Provider.
func (p *Proxier) OnServiceUpdate(oldService, service *v1.Service) {
	if p.tracker.Services.Update(oldService, service) {
		p.triggerIfReady()
	}
}

// OnServiceDelete implements Provider.
func (p *Proxier) OnServiceDelete(service *v1.Service) { p.OnServiceUpdate(service, nil) }

// OnServiceSynced implements Provider.
func (p *Proxier) OnServiceSynced() { p.synced(changetracker.InputServices) }

// OnEndpointSliceAdd implements Provider.
func (p *Proxier) OnEndpointSliceAdd(slice *discovery.EndpointSlice) { p.onSlice(slice, false) }

// OnEndpointSliceUpdate implements Provider. The old slice is not looked at.
func (p *Proxier) OnEndpointSliceUpdate(_, slice *discovery.EndpointSlice) { p.onSlice(slice, false) }

// OnEndpointSliceDelete implements Provider.
func (p *Proxier) OnEndpointSliceDelete(slice *discovery.EndpointSlice) { p.onSlice(slice, true) }

// OnEndpointSlicesSynced implements Provider.
func (p *Proxier) OnEndpointSlicesSynced() { p.synced(changetracker.InputEndpointSlices) }

func (p *Proxier) onSlice(slice *discovery.EndpointSlice, remove bool) {
	if p.tracker.Endpoints.EndpointSliceUpdate(slice, remove) {
		p.triggerIfReady()
	}
}

func (p *Proxier) synced(input changetracker.Input) {
	p.tracker.Synced(input)
	if waiting := p.tracker.Waiting(); slices.Equal(waiting, []changetracker.Input{changetracker.InputNode}) {
		p.log.Info("the first sync waits for the node: call OnNodeChange, or give Config.Node its addresses")
	}
	p.triggerIfReady()
}

// triggerIfReady does not spend the rate limit on syncs that could do nothing.
func (p *Proxier) triggerIfReady() {
	if p.isReady() {
		p.Trigger()
	}
}

func (p *Proxier) isReady() bool {
	select {
	case <-p.tracker.Ready():
		return true
	default:
		return false
	}
}

// OnNodeChange implements Provider.
func (p *Proxier) OnNodeChange(node changetracker.Node) {
	p.mu.Lock()
	p.node = node
	p.mu.Unlock()
	waited := !p.isReady()
	if p.tracker.SetNode(node) || waited {
		p.triggerIfReady()
	}
}

// OnServiceCIDRsChanged implements Provider.
func (p *Proxier) OnServiceCIDRsChanged(cidrs []netip.Prefix) {
	p.mu.Lock()
	same := slices.Equal(p.serviceCIDRs, cidrs)
	p.serviceCIDRs = slices.Clone(cidrs)
	p.mu.Unlock()
	if !same {
		p.triggerIfReady()
	}
}

// Tracker returns the trackers behind the Proxier, for programs that bring
// hand-built values instead of API objects, or want to look things up. Call
// Trigger after changing something in them.
func (p *Proxier) Tracker() *changetracker.Tracker { return p.tracker }

// Run implements Provider.
func (p *Proxier) Run(ctx context.Context) error {
	p.applySettings(ctx)
	untilEnd, stop := context.WithCancel(ctx)
	defer stop()
	var running sync.WaitGroup
	for _, f := range p.families {
		if w, ok := As[Watcher](f.engine); ok {
			running.Go(func() { f.watch(untilEnd, w) })
		}
	}
	var healthErr error
	running.Go(func() { healthErr = p.health.Run(untilEnd, p.Status) })
	err := p.runner.Run(ctx)
	stop()
	running.Wait()
	if healthErr != nil {
		err = errors.Join(err, fmt.Errorf("answer at health check node ports: %w", healthErr))
	}
	for _, f := range p.families {
		f.repair.Stop()
		err = errors.Join(err, f.engine.Close())
	}
	p.release()
	return err
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
		return p.runner.Sync(ctx)
	case <-p.runner.Done():
		return runner.ErrEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Cleanup implements Provider. One family's failure does not keep the other from
// being cleaned up.
func (p *Proxier) Cleanup(ctx context.Context) error {
	p.syncing.Lock()
	defer p.syncing.Unlock()
	defer p.release()
	if err := p.holdAll(true); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	var errs []error
	for _, f := range p.families {
		f.full = true
		errs = append(errs, f.announcements.withdrawAll(ctx))
		if err := f.engine.Cleanup(ctx); err != nil {
			errs = append(errs, fmt.Errorf("clean up %s: %w", f.name, err))
		}
		errs = append(errs, f.engine.Close())
	}
	if p.settings != nil {
		if err := p.settings.Restore(ctx); err != nil {
			errs = append(errs, fmt.Errorf("restore kernel settings: %w", err))
		}
	}
	return errors.Join(errs...)
}

// sync programs all families at once, each for itself.
func (p *Proxier) sync(ctx context.Context) error {
	p.syncing.Lock()
	defer p.syncing.Unlock()
	if !p.isReady() {
		return nil
	}
	p.mu.Lock()
	cidrs := p.serviceCIDRs
	p.mu.Unlock()
	errs := make([]error, len(p.families))
	taken := p.holdAll(false)
	var wg sync.WaitGroup
	for i, f := range p.families {
		wg.Go(func() { errs[i] = p.syncFamily(ctx, f, cidrs, taken) })
	}
	wg.Wait()
	p.retrySettings(ctx)
	return errors.Join(errs...)
}

// prepare takes over what may change while the proxy runs.
func (f *family) prepare(c *Config, node changetracker.Node, serviceCIDRs []netip.Prefix) {
	f.globals = c.globalsFor(f.name, node, serviceCIDRs)
	f.resolver = desired.Resolver{
		Node:                node,
		MasqueradeAll:       c.Masquerade.All,
		DetectsPods:         f.globals.DetectsPods(),
		Kinds:               c.Kinds,
		EditSelection:       c.EditSelection,
		DenyNodeExternalIPs: c.DenyNodeExternalIPs,
	}
}

// syncFamily programs a family, unless its objects are taken by somebody else.
func (p *Proxier) syncFamily(ctx context.Context, f *family, serviceCIDRs []netip.Prefix, taken error) error {
	queued, started := p.tracker.PendingSince(f.name), time.Now()
	f.began(started)
	due, held, began := f.repairDue(started)
	o := outcome{err: ErrContested}
	if taken != nil {
		o.err = taken
	} else if !held || !f.full {
		watch := stopwatch{last: started}
		_ = p.tracker.Apply(f.name, func(step changetracker.Step) ([]changetracker.ServicePortName, error) {
			watch.lap(StageTracker)
			f.prepare(&p.config, step.After.Node(), serviceCIDRs)
			o = f.apply(ctx, step, attempt{started: started, repair: due, watch: &watch})
			if !o.programmed {
				return nil, o.err
			}
			return o.retry, nil
		})
		o.stages = watch.stages
	}
	if o.full {
		f.repairEnded(began)
	}
	if o.programmed {
		o.err = errors.Join(o.err, p.follow(ctx, f, &o))
	}
	if o.err != nil {
		o.err = fmt.Errorf("%s: %w", f.name, o.err)
	}
	ended := time.Now()
	f.record(&o, started, ended)
	p.observe(f, &o, queued, started, ended)
	return o.err
}

// follow does what comes after programming.
func (p *Proxier) follow(ctx context.Context, f *family, o *outcome) error {
	watch := stopwatch{last: time.Now(), stages: o.stages}
	f.setProgrammed(o.state)
	deleted, checked, err := f.cleanFlows(ctx)
	if o.flowsDeleted = deleted; checked {
		watch.lap(StageConntrack)
	}
	if p.config.servesLoadBalancers() && (len(o.health.Ports) > 0 || o.health.Full) {
		watch.last = time.Now()
		o.health.NodePortAddresses = f.globals.NodePortAddresses
		p.health.Update(f.name, o.health)
		watch.lap(StageHealth)
	}
	o.stages = watch.stages
	p.mu.Lock()
	p.fullDone = p.fullDone || o.full
	p.mu.Unlock()
	return err
}

func (p *Proxier) observe(f *family, o *outcome, queued, started, ended time.Time) {
	report := SyncReport{
		Family: f.name, Full: o.full, Repair: o.repair, Queued: queued, Started: started, Duration: ended.Sub(started),
		Stages: o.stages, Changes: o.changes, ServicePorts: o.servicePorts, Triggers: o.triggers, Apply: o.applied,
		Failed: len(o.failed), FlowsDeleted: o.flowsDeleted, NoLocalInternal: f.shortages.count.internal, NoLocalExternal: f.shortages.count.external,
		Problems: p.problemCounts(), Err: o.err,
	}
	if !errors.Is(o.err, ErrContested) {
		p.mu.Lock()
		p.history.add(report)
		p.mu.Unlock()
	}
	if p.observer != nil {
		p.observer.ObserveSync(report)
	}
}

// problemCounts counts what Status.Problems lists.
func (p *Proxier) problemCounts() map[changetracker.Reason]int {
	counts := p.tracker.ProblemCounts()
	for _, f := range p.families {
		f.countConflicts(counts)
	}
	return counts
}

// Status implements Provider.
func (p *Proxier) Status() Status {
	problems, conditions := p.tracker.Problems(), p.health.Conditions()
	p.mu.Lock()
	s := Status{
		Synced: true, Families: map[v1.IPFamily]FamilyStatus{}, Problems: problems, Conditions: append(conditions, p.settingConditions...),
		Node: p.node, Tracked: p.tracker.Counts(), Waiting: p.tracker.Waiting(), Without: slices.Clone(p.without),
	}
	p.mu.Unlock()
	if queued := p.queued.Load(); queued != 0 {
		s.LastQueued = time.Unix(0, queued)
	}
	now := time.Now()
	for _, f := range p.families {
		family, conditions, conflicts := f.status(p.tracker.PendingSince(f.name), now)
		s.Families[f.name] = family
		s.Synced = s.Synced && family.Synced
		s.Conditions = append(s.Conditions, conditions...)
		s.Problems = append(s.Problems, conflicts...)
	}
	slices.SortStableFunc(s.Problems, func(a, b changetracker.Problem) int {
		return slices.Compare([]string{a.Object, a.Field, a.Value}, []string{b.Object, b.Field, b.Value})
	})
	slices.SortStableFunc(s.Conditions, func(a, b Condition) int {
		return slices.Compare([]string{a.Type, string(a.Family)}, []string{b.Type, string(b.Family)})
	})
	return s
}
