package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// Engine programs one IP family: the rules of nftables, which do everything, and before them sockets.
// It implements proxier.Engine.
type Engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	rules  proxier.Engine // an *nftables.Engine, never nil

	forward   *forwarder // never nil
	datagrams *datagrams // nil if UDP is left to the rules
	// withoutUDP says why UDP is left to the rules although Sockets.UDP says otherwise; else it is "".
	withoutUDP string

	mu       sync.Mutex // guards all below; Watch reads the links
	programs *programs  // nil until the first Apply
	layer    *layer     // so is this
	// without is why sockets are not translated, and lacking that check finds it. Otherwise Watch has it tried
	// again then.
	without  error
	lacking  bool
	tryAt    time.Time
	tryPause time.Duration
	// cgroups are those that exist; missing are Sockets.Cgroups that match none.
	cgroups, missing []string
	limited          []*proxier.ServiceError // Result.Limited of the current Apply
	// Tests stand between the engine and the kernel: wrap has each call to the maps, and around, if not nil,
	// each change of a link or a pin.
	wrap   func(*tables) kernel
	around func(change func() error) error
	watch  time.Duration // between two looks at the links

	faults faults
}

// NewEngine returns the engine of one family. It keeps nothing open before the first Apply; for UDPTranslate, it tries what
// the kernel can do.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	return newEngine(config, family, deps, canDestroy)
}

// newEngine gets what says that the kernel cannot end sockets.
func newEngine(config Config, family v1.IPFamily, deps proxier.Deps, canDestroy func(v1.IPFamily) error) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	rules, err := nftables.NewEngine(config.Config, family, deps)
	if err != nil {
		return nil, err
	}
	log := lightdeps.Logger(deps.Logger, "ebpf", family)
	e := &Engine{config: config, family: family, rules: rules, log: log, forward: newForwarder(config, family, log), watch: watchPause}
	e.wrap = func(t *tables) kernel { return t }
	if config.Sockets.UDP != UDPTranslate {
		return e, nil
	}
	switch err := canDestroy(family); {
	case errors.Is(err, errUnavailable):
		e.withoutUDP, e.config.Sockets.UDP = fmt.Sprintf("rules do UDP: %v", err), UDPRules
		log.Warn("rules do UDP: see the error, or choose UDPRules", zap.Error(err))
	case err != nil:
		return nil, err
	default:
		e.datagrams = newDatagrams(&config, family, log)
	}
	return e, nil
}

// New returns a Provider with an engine for each family of the config. It also deletes stale UDP
// flows and serves health check node ports, unless deps replace that.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	complete := nodedeps.Complete(config.Config.Config, deps)
	return lightdeps.Provider(config.Config.Config, complete, func(family v1.IPFamily) (*Engine, error) {
		return NewEngine(config, family, complete)
	})
}

// Apply implements proxier.Engine. Sockets lose a frontend before the rules, and get one after them. A
// service port that the maps have no room for is left to the rules, and so is all if sockets cannot be
// translated. Whatever else fails at the sockets, the rules are programmed; then the error says so, and the
// next Update is full.
func (e *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.noteFaults()
	wanted := make(map[changetracker.ServicePortName]*carried, len(update.Changes))
	for s := range update.Services() {
		if c := e.config.Sockets.carry(s, &update.Globals); c != nil {
			wanted[s.Name] = c
		}
	}
	e.limited = nil
	ready, problem := e.prepare(&update, wanted)
	if errors.Is(problem, proxier.ErrInUse) {
		return proxier.Result{}, problem
	}
	result, err := e.rules.Apply(ctx, update)
	if err == nil {
		result.Report.Writes += e.forward.apply(&update, result.Failed)
	}
	if err == nil && ready {
		for _, f := range result.Failed {
			delete(wanted, f.Name) // what sockets have of it stays
		}
		problem = e.publishAll(&update, wanted)
		e.datagrams.follow(&update)
	}
	result.Limited = append(result.Limited, e.limited...)
	if e.layer != nil {
		result.Report.Writes += e.layer.writes
		e.layer.writes = 0
	}
	return result, errors.Join(err, problem)
}

func (e *Engine) noteFaults() {
	e.faults.note(faultOf(e.without, e.missing, cmp.Or(e.withoutUDP, e.datagrams.fault())))
}

// prepare opens the maps, and removes the frontends that sockets lose. ready is false if sockets are
// not translated.
func (e *Engine) prepare(update *desired.Update, wanted map[changetracker.ServicePortName]*carried) (ready bool, err error) {
	if update.Full { // begin removes frontends too
		err := e.orWithout(e.begin(wanted))
		return err == nil && e.translates(), err
	}
	if !e.translates() {
		return false, nil
	}
	for i := range update.Changes {
		name := update.Changes[i].Name
		if err := e.layer.withdraw(name, wanted[name]); err != nil {
			return false, err
		}
	}
	return true, nil
}

func (e *Engine) translates() bool { return e.layer != nil && e.without == nil }

// orWithout leaves everything to the rules, after an error that says that sockets cannot be translated.
// Programs of an earlier process, whose maps cannot be kept up to date, are detached.
func (e *Engine) orWithout(err error) error {
	unavailable := errors.Is(err, errUnavailable)
	if unavailable {
		if removed := e.removeSockets(); removed != nil {
			err, unavailable = errors.Join(err, removed), false
		}
	}
	if !unavailable {
		e.without = nil
		return err
	}
	if e.without == nil {
		e.log.Warn("sockets are not translated, rules do everything: see the error, or choose the nftables engine", zap.Error(err))
		e.tryPause = e.watch
		e.tryAt = time.Now().Add(e.tryPause)
	}
	e.without = err
	return nil
}

// begin opens what is pinned, or creates it, compares the maps with what is wanted, and attaches the
// programs. Frontends of no wanted service port are removed.
func (e *Engine) begin(wanted map[changetracker.ServicePortName]*carried) error {
	e.cgroups, e.missing = e.config.Sockets.findCgroups()
	if err := e.closedPrograms().check(); err != nil { // it may have gone
		return err
	}
	if e.layer == nil {
		if err := e.open(wanted); err != nil {
			return err
		}
	}
	orphans, err := e.layer.load(wanted)
	if err != nil {
		return err
	}
	if err := e.layer.remove(orphans); err != nil {
		return err
	}
	leavesUDP := e.datagrams == nil && e.programs.haveUDP()
	if err := e.layer.activate(e.layer.kernel); err != nil || !leavesUDP {
		return err
	}
	if err := newDatagrams(&e.config, e.family, e.log).endAll(e.programs.shared[mapDatagrams]); err != nil {
		e.log.Warn("connected UDP sockets keep their endpoints, even if those go: restart their programs", zap.Error(err))
	}
	return nil
}

func (e *Engine) open(wanted map[changetracker.ServicePortName]*carried) error {
	programs, err := e.openPrograms()
	if err != nil {
		return err
	}
	t, found, err := programs.loadTables()
	if err == nil && !found {
		t, err = newTables(e.family, need(wanted))
	}
	if err != nil {
		return errors.Join(err, programs.close())
	}
	if err := e.datagrams.load(programs.shared[mapDatagrams]); err != nil {
		return errors.Join(err, t.close(), programs.close())
	}
	e.programs = programs
	e.layer = &layer{
		kernel: e.wrap(t), unused: !found,
		replace: func(size capacity) (kernel, error) {
			t, err := newTables(e.family, size)
			return e.wrap(t), err
		},
		activate: func(k kernel) error { return programs.activate(tablesOf(k)) },
	}
	return nil
}

// publishAll gives sockets what the rules have.
func (e *Engine) publishAll(update *desired.Update, wanted map[changetracker.ServicePortName]*carried) error {
	if update.Full {
		added, _ := e.layer.add(wanted) // publish finds out which one fails
		for _, name := range added {
			delete(wanted, name)
		}
	}
	for i := range update.Changes {
		name := update.Changes[i].Name
		if c := wanted[name]; c != nil {
			if err := e.publish(name, c); err != nil {
				return err
			}
		}
	}
	return e.layer.free(false)
}

// publish gives a service port to sockets. If that fails, the rules have it alone.
func (e *Engine) publish(name changetracker.ServicePortName, c *carried) error {
	err := e.layer.publish(name, c)
	if err == nil {
		return nil
	}
	e.limited = append(e.limited, &proxier.ServiceError{Name: name, Err: fmt.Errorf("sockets do not have it, rules alone do: %w", err)})
	if e.layer.services == nil { // the programs could not be moved to larger maps
		return err
	}
	return e.layer.withdraw(name, nil)
}

// Cleanup implements proxier.Engine: it detaches the programs, removes what is pinned, and deletes the
// table of the rules. TCP sockets that are open go on; connected UDP sockets end.
func (e *Engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Join(e.forward.cleanup(), e.removeSockets(), e.rules.Cleanup(ctx))
}

func (e *Engine) removeSockets() error {
	if e.programs != nil { // their pins may be out of reach
		if err := e.programs.endLinks(); err != nil {
			return err
		}
	}
	if err := e.closeSockets(); err != nil {
		return err
	}
	p := e.closedPrograms()
	if _, err := os.Stat(filepath.Dir(p.dir)); errors.Is(err, fs.ErrNotExist) { // not p.dir: a process may have died after it was removed
		e.config.removeEmpty(filepath.Dir(p.dir))
		return nil
	}
	err := p.open(filepath.Dir(p.dir))
	if err == nil {
		err = e.detach(p)
	}
	return errors.Join(err, p.close())
}

// RemoveSockets detaches the programs of an instance, those of Forward too, and removes what it has pinned,
// in all IP families of the config. The table of the rules stays: it is for a node that goes on with the engine of
// package nftables under the same Names. TCP sockets that are open go on, but getpeername(2) then
// returns their endpoint. Connected UDP sockets end: see UDPTranslate. Only Config.Names, Config.NetNS,
// Config.Families, Sockets.BPFFS and Sockets.NetNSs count. It is no error if nothing is there. If a process uses it, the error is proxier.ErrInUse.
func RemoveSockets(config Config) error {
	config = config.WithDefaults()
	var errs []error
	for _, family := range config.Families {
		e := &Engine{config: config, family: family, log: zap.NewNop()}
		errs = append(errs, newForwarder(config, family, zap.NewNop()).cleanup(), e.removeSockets())
	}
	return errors.Join(errs...)
}

// detach removes everything, and ends the UDP sockets that nobody follows then.
func (e *Engine) detach(p *programs) error {
	if !p.haveUDP() {
		return p.remove()
	}
	objects, err := spec(e.family)
	if err != nil {
		return err
	}
	sockets := compatible(filepath.Join(p.dir, mapDatagrams), objects.Maps[mapDatagrams])
	if err := p.remove(); err != nil || sockets == nil {
		return err
	}
	err = newDatagrams(&e.config, e.family, e.log).endAll(sockets)
	return errors.Join(err, bpfx.Close(sockets))
}

// Close closes the maps, links and sockets that this process holds. The kernel objects stay, and do their
// work. A later call opens them again.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Join(e.forward.close(), e.closeSockets(), e.rules.Close())
}

func (e *Engine) closeSockets() error {
	e.datagrams.close()
	if e.programs == nil {
		return nil
	}
	err := errors.Join(e.layer.close(), e.programs.close())
	e.layer, e.programs = nil, nil
	return err
}

// Traits implements proxier.Engine.
func (e *Engine) Traits(s *desired.Service) desired.Traits {
	traits := e.rules.Traits(s)
	traits.Sockets = &e.config.Sockets
	traits.FastPath = traits.FastPath || e.forward.forwards()
	return traits
}

// Abilities implements proxier.Engine. Plan prints the frontends that sockets have, and why they lack the
// others, and then the rules; Dump the frontends in the maps, and then the rules. Counts are those of the rules:
// sockets do not count.
func (e *Engine) Abilities() proxier.Abilities {
	can := e.rules.Abilities()
	can.Watch, can.Plan, can.Dump, can.Verify, can.Conditions = e.Watch, e.Plan, e.Dump, e.Verify, e.faults.conditions
	can.Lingers = e.datagrams.lingers
	return can
}

// Plan is for Abilities.
func (e *Engine) Plan(update desired.Update) (string, error) {
	rules, err := e.rules.Abilities().Plan(update)
	return e.config.Sockets.text(&update) + rules, err
}

// Dump is for Abilities.
func (e *Engine) Dump(ctx context.Context, w io.Writer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.layer != nil {
		if err := dump(w, e.layer.kernel); err != nil {
			return err
		}
	}
	return errors.Join(e.forward.dump(w), e.rules.Abilities().Dump(ctx, w))
}

// SocketCounts returns the counts of the programs. It is an error if there are none, because nothing
// was applied yet, or because sockets are not translated.
func (e *Engine) SocketCounts() (SocketCounts, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.programs == nil {
		return SocketCounts{}, errors.Join(errors.New("no programs: sync first"), e.without)
	}
	var counts SocketCounts
	if e.datagrams != nil {
		counts.Ended = e.datagrams.ended.Load()
	}
	err := sumCounts(e.programs.shared[mapCounts], &counts.Translated, &counts.Namespace, &counts.Bound, &counts.Empty, &counts.NoMemory)
	return counts, err
}

// retry attaches the programs to cgroups that have come. An error means that only a full sync helps.
func (e *Engine) retry() error {
	e.forward.retry()
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.noteFaults()
	return e.followCgroups()
}

// triesAgain reports whether sockets may be translated now. What check does not find is tried, after pauses
// that double up to an hour.
func (e *Engine) triesAgain(now time.Time) bool {
	if e.closedPrograms().check() != nil {
		e.lacking = true
		return false
	}
	if !e.lacking && now.Before(e.tryAt) {
		return false
	}
	e.lacking, e.tryPause = false, min(2*e.tryPause, longestTryPause)
	e.tryAt = now.Add(e.tryPause)
	return true
}

const longestTryPause = time.Hour

var errFullSync = errors.New("a full sync opens the maps")

// followCgroups attaches the programs to the cgroups that exist now.
func (e *Engine) followCgroups() error {
	if e.without != nil && e.triesAgain(time.Now()) {
		return errFullSync
	}
	before := e.cgroups
	if e.cgroups, e.missing = e.config.Sockets.findCgroups(); slices.Equal(before, e.cgroups) {
		return nil
	}
	e.log.Info("cgroups have come or gone", zap.Strings("before", before), zap.Strings("now", e.cgroups))
	if !e.translates() || e.layer.services == nil {
		return errFullSync
	}
	return e.layer.activate(e.layer.kernel)
}

// watchPause is how often the links are compared: the kernel does not report their changes.
const watchPause = 10 * time.Second

// Watch is for Abilities. Damage of the rules is reported at once, that of links and pins
// within ten seconds. Maps are compared by full syncs.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	ctx, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	running.Go(func() { e.forward.watch(ctx) })
	running.Go(func() { e.datagrams.watch(ctx) })
	running.Go(func() {
		ticker := time.NewTicker(e.watch)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				failed := e.retry() != nil // before the links are looked at: a cgroup that has gone is no damage
				if object := cmp.Or(e.damagedObject(), e.forward.damaged()); failed || object != "" {
					damaged(proxier.Damage{Object: object})
				}
			}
		}
	})
	return e.rules.Abilities().Watch(ctx, damaged)
}

func (e *Engine) damagedObject() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.programs == nil {
		return ""
	}
	return e.programs.damaged()
}
