package proxier

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// family drives one engine. Its fields are owned by the goroutine that syncs it,
// which is never more than one at a time.
type family struct {
	name     v1.IPFamily
	engine   Engine
	resolver desired.Resolver
	globals  desired.Globals
	rank     map[types.NamespacedName]int // of important Services, from 1
	log      *zap.Logger

	claims  *claims
	lost    map[changetracker.ServicePortName][]desired.Key
	refused map[changetracker.ServicePortName][]netip.Addr
	full    bool // the next Update must be full: at start, and after a failure
	// retry are the service ports that failed in the last Update.
	retry          []changetracker.ServicePortName
	lastFull       time.Time
	period         time.Duration
	loadingRetries int // for a kernel that lacks something, maxLoadingRetries at start

	flows         *flowTracker
	shortages     shortages
	announcements *announcements
	staleFlows    Condition // guarded by Proxier.mu
	lock          lock
	lockTakenBy   string    // who has the lock's name, as was logged
	taken         Condition // guarded by Proxier.mu

	lag      lag         // guarded by Proxier.mu
	repairs  repairs     // guarded by Proxier.mu
	watching watching    // guarded by Proxier.mu
	repair   *time.Timer // wakes the runner for a repair
}

// attempt is what a sync of a family starts with.
type attempt struct {
	started time.Time
	repair  bool // there is damage to repair
	watch   *stopwatch
}

// outcome is what one sync of a family came to.
type outcome struct {
	full         bool
	repair       bool
	stages       []Stage
	state        *changetracker.State
	health       HealthUpdate
	applied      ApplyReport
	programmed   bool // everything, but for failed
	changes      int
	servicePorts int
	triggers     []time.Time
	failed       []*ServiceError
	flowsDeleted int
	err          error
}

// apply brings the engine to the State.
func (f *family) apply(ctx context.Context, state *changetracker.State, delta changetracker.Delta, s attempt) outcome {
	o := outcome{
		full:         delta.Full || f.full || s.repair || s.started.Sub(f.lastFull) >= f.period,
		repair:       s.repair,
		changes:      len(delta.Changes),
		servicePorts: state.Len(),
		state:        state,
	}
	f.full = true // unless this succeeds
	update := f.update(state, delta, o.full)
	s.watch.lap(StageResolve)
	f.announcements.before(ctx, state, &update)
	result, err := f.engine.Apply(ctx, update)
	for o.full && f.mayBeLoading(ctx, err) {
		result, err = f.engine.Apply(ctx, update)
	}
	o.applied = result.Report
	s.watch.split(StagePlan, StageApply, o.applied.Kernel)
	if o.err = err; err != nil {
		return o
	}
	o.failed = failures(result.Failed)
	o.err = joined(o.failed)
	o.programmed, f.full = true, false
	f.retry = namesOf(o.failed)
	f.flows.update(state, &update, &result)
	f.shortages.update(&update)
	o.err = errors.Join(o.err, f.announcements.after(ctx, &update, o.failed))
	o.health = healthUpdate(state, delta, o.full)
	if o.full {
		f.lastFull = s.started
	}
	for i := range delta.Changes {
		o.triggers = append(o.triggers, delta.Changes[i].Triggers...)
	}
	return o
}

// A kernel says that it lacks a feature while the module is still being loaded for
// somebody else, such as the other family: busybox's modprobe finds a module in
// /proc/modules, and does not wait until it works.
const (
	maxLoadingRetries = 3
	loadingPause      = 100 * time.Millisecond
)

// mayBeLoading says, after a pause, whether what the kernel lacked deserves another
// attempt before anybody hears of it. There are only a few in a family's life.
func (f *family) mayBeLoading(ctx context.Context, err error) bool {
	if f.loadingRetries == 0 || !errors.As(err, new(*UnsupportedError)) {
		return false
	}
	f.loadingRetries--
	f.log.Debug("asking again for what may be loading", zap.Error(err))
	select {
	case <-time.After(loadingPause):
		return true
	case <-ctx.Done():
		return false
	}
}

func (f *family) update(state *changetracker.State, delta changetracker.Delta, full bool) desired.Update {
	u := desired.Update{Family: f.name, Full: full, Globals: f.globals}
	if full {
		u.Changes = desired.ChangesTo(f.everything(state)...)
	} else {
		u.Changes = f.changed(state, delta)
	}
	return u
}

// everything resolves all service ports, the important ones first.
func (f *family) everything(state *changetracker.State) []*desired.Service {
	f.claims = newClaims(&f.globals)
	maps.DeleteFunc(f.lost, func(name changetracker.ServicePortName, _ []desired.Key) bool { return isGone(state, name) })
	maps.DeleteFunc(f.refused, func(name changetracker.ServicePortName, _ []netip.Addr) bool { return isGone(state, name) })
	services := make([]*desired.Service, 0, state.Len())
	for name := range state.All() {
		if s, ok := f.resolver.Resolve(state, name); ok {
			f.claims.update(name, s, func(changetracker.ServicePortName) {})
			services = append(services, s)
		}
	}
	slices.SortFunc(services, f.compare)
	for i, s := range services {
		services[i] = f.grant(s)
	}
	return services
}

func isGone(state *changetracker.State, name changetracker.ServicePortName) bool {
	_, ok := state.Service(name)
	return !ok
}

// changed resolves the service ports of the delta, those that failed, and those that win
// or lose a frontend by either. One that failed may be as it was before, and not in the
// delta: it no longer asks for what it asked for then.
func (f *family) changed(state *changetracker.State, delta changetracker.Delta) []desired.Change {
	changes := make([]desired.Change, 0, len(delta.Changes)+len(f.retry))
	for i := range delta.Changes {
		if c := &delta.Changes[i]; c.Before != nil || c.After != nil {
			changes = append(changes, desired.Change{Name: c.Name, Source: c})
		}
	}
	seen := make(map[changetracker.ServicePortName]bool, len(changes)+len(f.retry))
	for i := range changes {
		seen[changes[i].Name] = true
	}
	add := func(name changetracker.ServicePortName) {
		if !seen[name] {
			seen[name] = true
			changes = append(changes, desired.Change{Name: name})
		}
	}
	for _, name := range f.retry {
		add(name)
	}
	var others []changetracker.ServicePortName
	moved := func(name changetracker.ServicePortName) { others = append(others, name) }
	for i := range changes {
		c := &changes[i]
		c.After, _ = f.resolver.Resolve(state, c.Name)
		f.claims.update(c.Name, c.After, moved)
		if c.After == nil {
			delete(f.lost, c.Name)
			delete(f.refused, c.Name)
		}
	}
	known := len(changes)
	for _, name := range others {
		add(name)
	}
	for i := known; i < len(changes); i++ {
		changes[i].After, _ = f.resolver.Resolve(state, changes[i].Name)
	}
	return f.inOrder(changes)
}

// inOrder grants frontends, and puts first what is gone and then what loses some: a key
// is free before its new owner gets it, should the engine take several steps.
func (f *family) inOrder(changes []desired.Change) []desired.Change {
	type ranked struct {
		desired.Change

		step, rank int
	}
	all := make([]ranked, len(changes))
	for i, c := range changes {
		all[i] = ranked{Change: c}
		if c.After == nil {
			continue
		}
		all[i].step, all[i].rank = 2, f.rankOf(c.After)
		if all[i].After = f.grant(c.After); all[i].After != c.After {
			all[i].step = 1
		}
	}
	slices.SortFunc(all, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(a.step, b.step), cmp.Compare(a.rank, b.rank), a.Name.Compare(b.Name))
	})
	for i := range all {
		changes[i] = all[i].Change
	}
	return changes
}

func (f *family) grant(s *desired.Service) *desired.Service {
	f.noteRefused(s)
	granted, lost := f.claims.granted(s)
	switch {
	case len(lost) == 0:
		delete(f.lost, s.Name)
	case !slices.Equal(lost, f.lost[s.Name]):
		f.lost[s.Name] = lost
		f.log.Warn("frontend belongs to another service port", zap.Stringer("service", s.Name),
			zap.Stringer("frontend", lost[0]), zap.Stringer("owner", f.claims.owner(lost[0])))
	}
	return granted
}

// noteRefused keeps the external IPs that a service port asks for and does not get.
func (f *family) noteRefused(s *desired.Service) {
	switch {
	case len(s.Refused) == 0:
		delete(f.refused, s.Name)
	case !slices.Equal(s.Refused, f.refused[s.Name]):
		f.refused[s.Name] = s.Refused
		f.log.Warn("external IPs refused: this node or its pods have them; take them out of the Service",
			zap.Stringer("service", s.Name), zap.Stringers("externalIPs", s.Refused))
	}
}

// conflicts are the frontends that service ports ask for and do not get.
func (f *family) conflicts() []changetracker.Problem {
	once := map[changetracker.Problem]bool{} // and not for each port of the Service
	for name, addrs := range f.refused {
		for _, a := range addrs {
			once[changetracker.Problem{
				Object: "Service " + name.NamespacedName.String(), Field: "spec.externalIPs", Value: a.String(), Reason: changetracker.ReasonRefused,
			}] = true
		}
	}
	problems := slices.Collect(maps.Keys(once))
	for name, keys := range f.lost {
		for _, k := range keys {
			problems = append(problems, changetracker.Problem{
				Object: "Service " + name.NamespacedName.String(),
				Field:  "port " + name.Port,
				Value:  k.String() + " belongs to " + f.claims.owner(k).String(),
				Reason: changetracker.ReasonDuplicate,
			})
		}
	}
	return problems
}

// compare puts important Services first, then sorts by name.
func (f *family) compare(a, b *desired.Service) int {
	if d := f.rankOf(a) - f.rankOf(b); d != 0 {
		return d
	}
	return a.Name.Compare(b.Name)
}

func (f *family) rankOf(s *desired.Service) int {
	if r := f.rank[s.Name.NamespacedName]; r != 0 {
		return r
	}
	return len(f.rank) + 1
}

func namesOf(failed []*ServiceError) []changetracker.ServicePortName {
	names := make([]changetracker.ServicePortName, len(failed))
	for i, e := range failed {
		names[i] = e.Name
	}
	return names
}

// errNoCause is for engines that fail a service port without saying why.
var errNoCause = errors.New("the engine names no cause")

// failures are those that an engine returned: the first one of each service port, in
// their order.
func failures(failed []*ServiceError) []*ServiceError {
	failed = slices.DeleteFunc(slices.Clone(failed), func(e *ServiceError) bool { return e == nil })
	for i, e := range failed {
		if e.Err == nil {
			failed[i] = &ServiceError{Name: e.Name, Err: errNoCause, Partial: e.Partial}
		}
	}
	return firstOfEach(failed)
}

// firstOfEach sorts failures by service port, and keeps the first one of each.
func firstOfEach(failed []*ServiceError) []*ServiceError {
	slices.SortStableFunc(failed, func(a, b *ServiceError) int { return a.Name.Compare(b.Name) })
	return slices.CompactFunc(failed, func(a, b *ServiceError) bool { return a.Name == b.Name })
}

// joined is one error of several, nil of none.
func joined(failed []*ServiceError) error {
	errs := make([]error, len(failed))
	for i, e := range failed {
		errs[i] = e
	}
	return errors.Join(errs...)
}
