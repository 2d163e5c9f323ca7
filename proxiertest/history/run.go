package history

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// Plane is a network namespace that Providers of one engine program, one after another. It may also
// have the method HasSockets(), if its engines serve clients by sockets of the process, and SetMode(number
// int) with CleanOthers(context.Context) error, if its processes have several engines.
type Plane interface {
	// Config has what all Providers share; the history sets the rest.
	Config() proxier.Config
	// Engines returns the engines of a new process. Each of their calls to the kernel goes
	// through calls.
	Engines(config proxier.Config, calls *Calls) (map[v1.IPFamily]proxier.Engine, error)
	// Kernel returns what the kernel holds of the engine, as text that does not depend on the
	// history before; "" is nothing.
	Kernel() (string, error)
	// Damage changes or deletes the engine's objects as another program. It may fail, if
	// the objects are not there.
	Damage(number int, objects *Objects)
}

// withSockets is a Plane with engines that serve clients by sockets of the process. A restart has to
// open them again, and connection tracking has nothing of such engines.
type withSockets interface{ HasSockets() }

func hasSockets(p Plane) bool {
	_, ok := p.(withSockets)
	return ok
}

// modes is a Plane with several engines, of which each process has one.
type modes interface {
	Plane
	// SetMode chooses the engine of the processes that start later.
	SetMode(number int)
	// CleanOthers removes what the other engines have programmed, while a process runs.
	CleanOthers(ctx context.Context) error
}

// run is a history that runs.
type run struct {
	plane, fresh Plane
	config       proxier.Config
	objects      Objects
	life         *life
	flows        *flows
	patience     time.Duration
	converged    bool // nothing happened since the last Converge
	mixed        bool // another engine may have left objects
	fired        int  // interventions in processes that have ended
	// next are interventions in the next process.
	next []intervention
}

// life is one process.
type life struct {
	*proxier.Proxier

	calls    *Calls
	side     *side
	refusals *refusals
	noise    *noise                    // nil: none
	told     changetracker.EventCounts // the calls with objects
	stop     context.CancelFunc
	ended    chan error
}

// Run runs a history in plane. It compares with what a new Provider programs in fresh, which
// must be empty, and is again afterwards. The kernel must become right within patience of each
// Converge. Run leaves plane empty too.
func Run(ctx context.Context, plane, fresh Plane, steps []Event, patience time.Duration) error {
	_, err := runCounting(ctx, plane, fresh, steps, patience)
	return err
}

// runCounting also returns how many of the planned interventions happened.
func runCounting(ctx context.Context, plane, fresh Plane, steps []Event, patience time.Duration) (fired int, err error) {
	r := &run{
		plane: plane, fresh: fresh, patience: patience, flows: newFlows(),
		objects: Objects{Services: map[string]*v1.Service{}, Slices: map[string]*discovery.EndpointSlice{}},
	}
	r.config = plane.Config()
	r.config.Tracker.DecorateEndpoint = new(oracle.Cluster).Tracker().DecorateEndpoint
	r.config.Runner = runner.Options{MinInterval: runner.Unlimited, Retry: runner.Backoff{Initial: time.Millisecond, Max: 20 * time.Millisecond}}
	for i := range steps {
		if err = r.step(ctx, &steps[i]); err != nil {
			err = fmt.Errorf("step %d (%v): %w", i, &steps[i], err)
			break
		}
	}
	err = errors.Join(err, r.end(), r.clean(context.WithoutCancel(ctx), plane))
	return r.fired, err
}

func (r *run) step(ctx context.Context, s *Event) error {
	if err := r.reviveOrStart(ctx, s); err != nil {
		return err
	}
	before := r.converged
	r.converged = false
	switch s.Kind {
	case SetService, DeleteService, SetSlice, DeleteSlice, SetNode, Refuse:
		r.event(s)
		return r.flows.note(ctx, r)
	case RunSync:
		r.converged = before
		return ignore(r.life.Sync(ctx)) // it may fail because of what was planned
	case Fail, Lose:
		r.plan(s, intervention{Call: s.Call, Err: s.Error, Late: s.Kind == Lose})
	case Hang:
		r.plan(s, intervention{Call: s.Call, Err: syscall.ETIMEDOUT, Hang: true})
	case Kill:
		r.plan(s, intervention{Call: s.Call, Kill: true, Late: s.Late})
	case DamageKernel:
		r.plane.Damage(s.Damage, &r.objects)
	case DamageAt:
		r.damageAt(s)
	case Restart:
		return r.restart(ctx, before)
	case Cleanup:
		return r.leaveAndReturn(ctx)
	case Inspect:
		return r.inspect(ctx, s.Damage, before)
	case ChangeMode:
		return r.changeMode(ctx, s)
	case Busy:
		r.life.beNoisy()
	case Converge:
		return r.converge(ctx, s.Late)
	}
	return nil
}

// plan plans an intervention in this process or in the next.
func (r *run) plan(s *Event, i intervention) {
	if s.Next {
		r.next = append(r.next, i)
	} else {
		r.life.calls.plan(i)
	}
}

func ignore(error) error { return nil }

// reviveOrStart starts a process if there is none, or the last one was killed. The first one
// starts after the first events.
func (r *run) reviveOrStart(ctx context.Context, s *Event) error {
	switch {
	case r.life != nil && !r.life.calls.Dead():
		return nil
	case r.life == nil && (s.Kind == SetService || s.Kind == SetSlice || s.Kind == SetNode):
		return nil
	}
	return r.replace(ctx)
}

// replace ends the process, if there is one, and starts another.
func (r *run) replace(ctx context.Context) error {
	if err := r.end(); err != nil {
		return err
	}
	return r.start(ctx)
}

func (r *run) damageAt(s *Event) {
	objects := Objects{Services: maps.Clone(r.objects.Services), Slices: maps.Clone(r.objects.Slices), Node: r.objects.Node}
	do := func() { r.plane.Damage(s.Damage, &objects) }
	i := intervention{Call: s.Call}
	if s.Late || s.Twice {
		i.After = do
	}
	if !s.Late || s.Twice {
		i.Before = do
	}
	r.plan(s, i)
}

// event changes the objects, or what the engine refuses, and tells the process, if there is one.
func (r *run) event(s *Event) {
	h := proxier.EventHandler(nobody{})
	if r.life != nil {
		h = r.life
		r.life.told = r.told(s, r.life.told)
	}
	switch s.Kind {
	case SetService:
		set(r.objects.Services, s.Service.Name, s.Service, h.OnServiceAdd, h.OnServiceUpdate)
	case DeleteService:
		remove(r.objects.Services, s.Service.Name, h.OnServiceDelete)
	case SetSlice:
		set(r.objects.Slices, s.Slice.Name, triggered(s.Slice), h.OnEndpointSliceAdd, h.OnEndpointSliceUpdate)
	case DeleteSlice:
		remove(r.objects.Slices, s.Slice.Name, h.OnEndpointSliceDelete)
	case Refuse:
		r.life.refusals.add(s)
	default:
		r.objects.Node = s.Node
		h.OnNodeChange(s.Node)
	}
}

// told adds an event to a count. The deletion of what is not there is none.
func (r *run) told(s *Event, c changetracker.EventCounts) changetracker.EventCounts {
	switch {
	case s.Kind == SetService, s.Kind == DeleteService && r.objects.Services[s.Service.Name] != nil:
		c.Services++
	case s.Kind == SetSlice, s.Kind == DeleteSlice && r.objects.Slices[s.Slice.Name] != nil:
		c.EndpointSlices += r.counts(s.Slice)
	}
	return c
}

// counts returns 1 for a slice of a family that the Plane has.
func (r *run) counts(s *discovery.EndpointSlice) uint64 {
	if families := r.config.Families; len(families) > 0 && !slices.Contains(families, v1.IPFamily(s.AddressType)) {
		return 0
	}
	return 1
}

func set[T any](all map[string]*T, name string, object *T, added func(*T), updated func(old, now *T)) {
	old := all[name]
	if all[name] = object; old == nil {
		added(object)
	} else {
		updated(old, object)
	}
}

func remove[T any](all map[string]*T, name string, deleted func(*T)) {
	old := all[name]
	if delete(all, name); old != nil {
		deleted(old)
	}
}

// triggered returns a slice whose cause the control plane sees now.
func triggered(s *discovery.EndpointSlice) *discovery.EndpointSlice {
	s = s.DeepCopy()
	s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)}
	return s
}

// nobody hears no events.
type nobody struct{ proxier.EventHandler }

func (nobody) OnServiceAdd(*v1.Service)                            {}
func (nobody) OnServiceUpdate(_, _ *v1.Service)                    {}
func (nobody) OnServiceDelete(*v1.Service)                         {}
func (nobody) OnEndpointSliceAdd(*discovery.EndpointSlice)         {}
func (nobody) OnEndpointSliceUpdate(_, _ *discovery.EndpointSlice) {}
func (nobody) OnEndpointSliceDelete(*discovery.EndpointSlice)      {}
func (nobody) OnNodeChange(changetracker.Node)                     {}

// newLife starts a process with these engines, and gives it all objects.
func (r *run) newLife(ctx context.Context, calls *Calls, side *side, engines map[v1.IPFamily]proxier.Engine) (*life, error) {
	config := r.config
	config.Node = r.objects.Node
	deps := proxier.Deps{Health: side, Announcer: side, Observer: side}
	if !hasSockets(r.plane) {
		deps.Conntrack = &proxier.Conntrack{Tracks: func(p desired.Protocol) bool { return p == desired.UDP }, Clean: side.clean}
	}
	p, err := proxier.New(config, deps, engines)
	if err != nil {
		return nil, err
	}
	l := &life{Proxier: p, calls: calls, side: side, ended: make(chan error, 1)}
	ctx, l.stop = context.WithCancel(ctx)
	go func() { l.ended <- p.Run(ctx) }()
	l.load(&r.objects)
	l.told.Services = uint64(len(r.objects.Services))
	for _, s := range r.objects.Slices {
		l.told.EndpointSlices += r.counts(s)
	}
	return l, nil
}

// load gives the objects to a process, in random order.
func (l *life) load(o *Objects) {
	events := []func(){func() { l.OnNodeChange(o.Node) }}
	for _, s := range o.Services {
		events = append(events, func() { l.OnServiceAdd(s) })
	}
	for _, s := range o.Slices {
		events = append(events, func() { l.OnEndpointSliceAdd(s) })
	}
	rand.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
	for _, event := range events {
		event()
	}
	l.OnServiceCIDRsChanged(serviceCIDRs())
	l.OnServiceSynced()
	l.OnEndpointSlicesSynced()
}

func (r *run) start(ctx context.Context) (err error) {
	calls := &Calls{planned: r.next}
	r.next = nil
	engines, err := r.plane.Engines(r.config, calls)
	if err != nil {
		return err
	}
	refusals := &refusals{byName: map[string]*refusal{}}
	for family, e := range engines {
		engines[family] = refusing{e, refusals, rand.IntN(4)}
	}
	r.flows.restarted()
	if r.life, err = r.newLife(ctx, calls, newSide(calls, r.flows), engines); err == nil {
		r.life.refusals = refusals
	}
	return err
}

// end ends the process, if there is one.
func (r *run) end() error {
	if r.life == nil {
		return nil
	}
	l := r.life
	r.life = nil
	err := l.end()
	r.fired += l.calls.happened()
	return err
}

func (l *life) end() error {
	l.quiet()
	l.stop()
	if err := <-l.ended; err != nil && !l.calls.Dead() {
		return fmt.Errorf("end of Run: %w", err)
	}
	return nil
}

// restart ends the process and starts another. If everything was converged, that one must write
// nothing.
func (r *run) restart(ctx context.Context, converged bool) error {
	if err := r.replace(ctx); err != nil || !converged {
		return err
	}
	if err := r.whenFree(func() error { return proxiertest.Sync(ctx, r.life) }); err != nil {
		return fmt.Errorf("first sync after a restart: %w", err)
	}
	if n := r.life.side.writes(); n > 0 && !hasSockets(r.plane) {
		return fmt.Errorf("a restart wrote %d objects though the kernel was right", n)
	}
	return nil
}

// leaveAndReturn removes all objects, as before a change to another engine, and starts again.
func (r *run) leaveAndReturn(ctx context.Context) error {
	if err := r.end(); err != nil {
		return err
	}
	if err := r.clean(ctx, r.plane); err != nil {
		return err
	}
	return r.start(ctx)
}

// clean removes all objects of the engine.
func (r *run) clean(ctx context.Context, plane Plane) error {
	if m, ok := plane.(modes); ok {
		if err := r.whenFree(func() error { return m.CleanOthers(ctx) }); err != nil {
			return err
		}
	}
	config := r.config
	config.NetNS = plane.Config().NetNS
	engines, err := plane.Engines(config, &Calls{})
	if err != nil {
		return err
	}
	p, err := proxier.New(config, proxier.Deps{}, engines)
	if err != nil {
		return err
	}
	if err := r.whenFree(func() error { return p.Cleanup(ctx) }); err != nil {
		return err
	}
	left, err := plane.Kernel()
	if err == nil && left != "" {
		err = fmt.Errorf("left by Cleanup:\n%s", left)
	}
	return err
}

// wanted returns what a new process programs in an empty network namespace.
func (r *run) wanted(ctx context.Context) (text string, err error) {
	there := *r
	there.plane, there.config.NetNS = r.fresh, r.fresh.Config().NetNS
	calls := &Calls{}
	engines, err := r.fresh.Engines(there.config, calls)
	if err != nil {
		return "", err
	}
	l, err := there.newLife(ctx, calls, newSide(calls, newFlows()), engines)
	if err != nil {
		return "", err
	}
	err = r.whenFree(func() error { return proxiertest.Sync(ctx, l) })
	if err == nil {
		text, err = r.fresh.Kernel()
	}
	return text, errors.Join(err, l.end(), there.clean(ctx, r.fresh))
}

// converge waits until the kernel is right, without or with a request for a sync.
func (r *run) converge(ctx context.Context, ask bool) error {
	if err := r.endFaults(ctx); err != nil {
		return err
	}
	if err := r.endRefusals(); err != nil {
		return err
	}
	if err := r.unmix(ctx); err != nil {
		return err
	}
	want, err := r.wanted(ctx)
	if err != nil {
		return fmt.Errorf("program the objects in an empty network namespace: %w", err)
	}
	var last error
	if ask {
		last = r.life.Sync(ctx)
	}
	var got string
	if !r.soon(func() bool {
		if got, last = r.plane.Kernel(); last != nil || got != want {
			return false
		}
		last = proxiertest.Sync(ctx, r.life)
		return last == nil
	}) {
		return fmt.Errorf("not converged within %v: %w\n%s\nstatus: %+v", r.patience, last, difference(got, want), r.life.Status().Families)
	}
	return r.mustBeIdle(ctx, want)
}

// endFaults cancels all interventions. If one has just killed the process, another one starts.
func (r *run) endFaults(ctx context.Context) error {
	for r.life.calls.cancel(); r.life.calls.Dead(); r.life.calls.cancel() {
		if err := r.replace(ctx); err != nil {
			return err
		}
	}
	return nil
}

// mustBeIdle: another sync writes nothing, and all that is beside the kernel is right.
func (r *run) mustBeIdle(ctx context.Context, want string) error {
	before := r.life.side.writes()
	if err := proxiertest.Sync(ctx, r.life); err != nil {
		return fmt.Errorf("sync once more: %w", err)
	}
	if n := r.life.side.writes() - before; n > 0 {
		return fmt.Errorf("an idle sync wrote %d objects", n)
	}
	got, err := r.plane.Kernel()
	if err == nil && got != want {
		err = fmt.Errorf("an idle sync changed the kernel:\n%s", difference(got, want))
	}
	r.converged = err == nil
	return errors.Join(err, r.mustVerify(ctx), r.checkSide(ctx))
}

// whenFree repeats what needs the lock of the names: on a busy machine a program that another
// test starts may have a copy of the lock for long, between fork and execve.
func (r *run) whenFree(do func() error) (err error) {
	r.soon(func() bool {
		err = do()
		return !errors.Is(err, proxier.ErrInUse)
	})
	return err
}

// soon waits until a condition holds.
func (r *run) soon(holds func() bool) bool { return poll.Within(r.patience, holds) }

// soonNil waits until check returns nil, and returns its last error.
func (r *run) soonNil(check func() error) (err error) {
	r.soon(func() bool { err = check(); return err == nil })
	return err
}

// difference lists the lines that only one of two texts has.
func difference(got, want string) string {
	have, need := strings.Split(got, "\n"), strings.Split(want, "\n")
	var text strings.Builder
	list := func(what string, lines, others []string) {
		for _, line := range lines {
			if !slices.Contains(others, line) {
				text.WriteString(what + ": " + line + "\n")
			}
		}
	}
	list("unexpected", have, need)
	list("missing", need, have)
	if text.Len() == 0 && got != want {
		text.WriteString("the same lines, but some more often\n")
	}
	return text.String()
}
