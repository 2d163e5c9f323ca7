package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// kernel is what the engine needs of the programs.
type kernel interface {
	save(ctx context.Context, table string) ([]byte, error)
	restore(ctx context.Context, input []byte) error
}

// watchable are programs whose tables can be watched.
type watchable interface {
	watcher(owned func(chain string) bool) (watcher, error)
}

// Engine programs one IP family. It implements proxier.Engine, Planner, Dumper
// and Watcher. Calls must not overlap, but Watch and Traits run beside all others.
type Engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	open   func(ctx context.Context) (kernel, error)
	// written wakes Watch after a write; without one it looks every watchPeriod.
	written     chan struct{}
	watchPeriod time.Duration

	mu     sync.Mutex // held while the tables are written; guards all below
	kernel kernel     // nil until it is needed
	model  *model
	have   map[string]ruleset // what the tables hold, if trusted
	jumps  map[chainID][]rule // from the kernel's chains to ours, likewise
	rules  map[string]int     // how many rules that is
	// trusted says that have is what the kernel holds.
	trusted bool
	// recent are the service ports that the update under way sets.
	recent  map[changetracker.ServicePortName]step
	refused map[changetracker.ServicePortName]refusal
	report  proxier.ApplyReport
	guard   guard
	// setLocalnet says that route_localnet was set by us.
	setLocalnet bool
}

// step is a service port before and after an update.
type step struct{ before, after *placed }

// refusal is a service port that the programs do not accept.
type refusal struct {
	placed *placed
	err    error
}

// NewEngine returns the engine of one family. It runs no program and writes nothing
// before the first Apply.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{config: config, family: family, written: make(chan struct{}, 1), watchPeriod: watchPeriod, log: lightdeps.Logger(deps.Logger, "iptables", family)}
	e.open = func(ctx context.Context) (kernel, error) {
		return openTool(ctx, toolConfig{
			family: family, netNS: config.NetNS, variant: config.Variant,
			lockWait: config.LockWait, timeout: config.Timeout, log: e.log,
		})
	}
	return e, nil
}

// New returns a Provider with an iptables engine for each family of the config,
// which also forgets stale UDP flows and answers at health check node ports, unless
// deps say otherwise.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	deps = nodedeps.Complete(config.Config, deps)
	return lightdeps.Provider(config.Config, deps, func(family v1.IPFamily) (*Engine, error) { return NewEngine(config, family, deps) })
}

// errNotFull is a bug of the caller: it must send a full Update first, after every
// failure, and when what all Services share has changed.
var errNotFull = errors.New("iptables: a partial update where a full one is needed")

// Apply implements proxier.Engine.
func (e *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	defer e.wake() // when it is unlocked
	e.mu.Lock()
	defer e.mu.Unlock()
	e.report = proxier.ApplyReport{}
	err := e.apply(ctx, &update)
	return proxier.Result{Failed: e.refusals(&update), Report: e.report}, err
}

func (e *Engine) apply(ctx context.Context, update *desired.Update) error {
	if err := e.connect(ctx); err != nil {
		return err
	}
	trusted := e.trusted
	e.trusted = false // unless all goes well
	if !update.Full && (!trusted || !e.sameGlobals(&update.Globals)) {
		return errNotFull
	}
	if update.Full {
		e.refused = map[changetracker.ServicePortName]refusal{}
		e.model = newModel(&e.config, e.family, update.Globals)
		e.model.options.keepInvalid = e.config.KeepInvalid || e.beLiberal()
	}
	e.model.globals = update.Globals
	e.recent = map[changetracker.ServicePortName]step{}
	for name := range update.Removed() {
		e.set(name, nil)
	}
	for s := range update.Services() {
		e.set(s.Name, e.model.place(s))
	}
	if err := e.write(ctx, update.Full); err != nil {
		return err
	}
	e.trusted = true
	return e.allowLocalnet()
}

// Plan implements proxier.Planner: it returns the input of iptables-restore that
// programs the update from scratch.
func (e *Engine) Plan(update desired.Update) (text string, err error) {
	return plan(&e.config, e.family, &update), nil
}

// wake lets Watch look at once.
func (e *Engine) wake() {
	select {
	case e.written <- struct{}{}:
	default:
	}
}

// sameGlobals says that no chain but those of the update's service ports changes.
func (e *Engine) sameGlobals(g *desired.Globals) bool {
	was := &e.model.globals
	return was.SameDetection(g) && slices.Equal(was.PodCIDRs, g.PodCIDRs) && slices.Equal(was.NodePortAddresses, g.NodePortAddresses)
}

// set puts a service port in place. One that was refused as it is stays as it was.
func (e *Engine) set(name changetracker.ServicePortName, p *placed) {
	if r, ok := e.refused[name]; ok && p != nil && p.same(r.placed) {
		return
	}
	delete(e.refused, name)
	if p != nil {
		e.recent[name] = step{before: e.model.placed[name], after: p}
	}
	e.model.set(name, p)
}

// refusals are the service ports of the update that were set aside.
func (e *Engine) refusals(update *desired.Update) (failed []*proxier.ServiceError) {
	for s := range update.Services() {
		if r, ok := e.refused[s.Name]; ok {
			failed = append(failed, &proxier.ServiceError{Name: s.Name, Err: r.err})
		}
	}
	return failed
}

// mostRefusals is how many times a sync looks for a service port that the programs
// do not accept.
const mostRefusals = 8

// write brings the tables to the model: what changed, or everything after reading
// them. A service port that makes that fail is set aside.
func (e *Engine) write(ctx context.Context, everything bool) error {
	for attempt := 0; ; attempt++ {
		script, err := e.attempt(ctx, everything)
		if _, refused := errors.AsType[*restoreError](err); !refused {
			return err
		}
		if attempt == mostRefusals || !e.setAside(err, script) {
			return e.isolate(ctx, err)
		}
		everything = true // what has been committed is not known
	}
}

// attempt writes once, and returns what. Where somebody else has changed something, a
// change cannot be written on top of it.
func (e *Engine) attempt(ctx context.Context, everything bool) (text string, err error) {
	intact, err := e.guard.look(everything)
	if err != nil {
		return "", err
	}
	everything = everything || !intact
	s, want, err := e.compose(ctx, everything)
	if err != nil {
		return "", err
	}
	if s.b.Len() > 0 {
		e.report.Writes, e.report.Bytes, e.report.Transactions = s.writes, s.b.Len(), s.tables
		if err := e.guard.during(func() error { return e.kernel.restore(ctx, s.b.Bytes()) }); err != nil {
			return s.b.String(), err
		}
		e.take(want)
	}
	e.report.Rules, e.report.RulesWritten = maps.Clone(e.rules), s.rules
	return "", e.guard.wrote(e.effectOf(s, everything))
}

// isolate finds the service ports that are refused when no line tells, as
// iptables-legacy does for what the kernel refuses. If it goes wrong without any of
// the update's service ports, they are not the cause.
func (e *Engine) isolate(ctx context.Context, cause error) error {
	names := slices.SortedFunc(maps.Keys(e.recent), changetracker.ServicePortName.Compare)
	for _, name := range names {
		e.model.set(name, e.recent[name].before)
	}
	if _, err := e.attempt(ctx, true); err != nil {
		return errors.Join(cause, err)
	}
	if err := e.admit(ctx, names); err != nil {
		return err
	}
	_, err := e.attempt(ctx, true)
	return err
}

// admit puts service ports in place, half of them at a time if all at once fails.
func (e *Engine) admit(ctx context.Context, names []changetracker.ServicePortName) error {
	for _, name := range names {
		e.model.set(name, e.recent[name].after)
	}
	_, err := e.attempt(ctx, true)
	if _, refused := errors.AsType[*restoreError](err); !refused {
		return err
	}
	for _, name := range names {
		e.model.set(name, e.recent[name].before)
	}
	if len(names) == 1 {
		e.refuse(names[0], err)
		return nil
	}
	half := len(names) / 2
	if err := e.admit(ctx, names[:half]); err != nil {
		return err
	}
	return e.admit(ctx, names[half:])
}

// refuse sets a service port aside: it stays as it was.
func (e *Engine) refuse(name changetracker.ServicePortName, err error) {
	e.log.Warn("service port set aside", zap.Stringer("service", name), zap.Error(err))
	e.refused[name] = refusal{e.recent[name].after, err}
	e.model.set(name, e.recent[name].before)
}

// compose says what is to be written, and what the tables hold then.
func (e *Engine) compose(ctx context.Context, everything bool) (s *script, want map[string]ruleset, err error) {
	if !everything {
		want = e.model.tables()
		nat := changeOf(e.have[tableNAT], want[tableNAT], false)
		return compose(nat, changeOf(e.have[tableFilter], want[tableFilter], true)), want, nil
	}
	want = e.model.everything()
	changes := map[string]*change{}
	e.have, e.rules, e.jumps = map[string]ruleset{}, map[string]int{}, map[chainID][]rule{}
	for _, table := range []string{tableNAT, tableFilter} {
		text, err := e.kernel.save(ctx, table)
		if err != nil {
			return nil, nil, err
		}
		o, err := parse(text, e.model.names.owns)
		if err != nil {
			return nil, nil, err
		}
		e.have[table] = o.chains
		e.rules[table] = o.chains.count()
		if table == tableFilter {
			if err := e.completeLocalnet(&o, want[table]); err != nil {
				return nil, nil, err
			}
		}
		held := o.held()
		for chain := range o.chains {
			if _, ok := want[table][chain]; !ok && held[chain] {
				want[table][chain] = []rule{}
			} else if !ok {
				want[table][chain] = nil
			}
		}
		c := changeOf(o.chains, want[table], table == tableFilter)
		c.first.deletes, c.first.inserts = repairJumps(table, e.model.jumps(), o.jumps)
		o.jumpsAfter(table, &c.first, e.jumps)
		changes[table] = c
	}
	return compose(changes[tableNAT], changes[tableFilter]), want, nil
}

// completeLocalnet completes what the filter table must hold.
func (e *Engine) completeLocalnet(o *observed, want ruleset) error {
	chain := e.model.names.localnet()
	rules, err := e.guardLocalnet(o.chains[chain], e.model.localhost())
	if err != nil {
		return err
	}
	if e.model.keepsLocalnet = rules != nil; e.model.keepsLocalnet {
		want[chain] = rules
	}
	return nil
}

// take notes what was written.
func (e *Engine) take(want map[string]ruleset) {
	for table, chains := range want {
		for chain, rules := range chains {
			e.rules[table] += len(rules) - len(e.have[table][chain])
			if rules == nil {
				delete(e.have[table], chain)
			} else {
				e.have[table][chain] = rules
			}
		}
	}
}

// setAside takes out the service ports whose lines the programs refused, and says
// whether there were any.
func (e *Engine) setAside(err error, input string) bool {
	failed, ok := errors.AsType[*restoreError](err)
	if !ok {
		return false
	}
	lines := strings.Split(input, "\n")
	found := false
	for _, number := range failed.Lines {
		if number < 1 || number > len(lines) {
			continue
		}
		for _, name := range e.model.owners(lines[number-1]) {
			if _, ok := e.recent[name]; !ok {
				continue // it was accepted as it is
			}
			e.refuse(name, fmt.Errorf("%w: in %q", err, lines[number-1]))
			found = true
		}
	}
	return found
}

// Traits implements proxier.Engine.
func (e *Engine) Traits(*desired.Service) desired.Traits {
	return desired.Traits{ServiceIPsPass: true, LoopbackNodePorts: e.config.LocalhostNodePorts}
}

// OwnsNames is true, see proxier.Engine: the chains have names of the instance.
func (e *Engine) OwnsNames() bool { return true }

// Close forgets what the kernel holds. The rules stay.
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
	timed := &timedKernel{kernel: k, waited: &e.report.Kernel}
	if w, ok := k.(watchable); ok {
		if e.guard.watcher, err = w.watcher(e.config.chains().owns); err != nil {
			return watchError(err)
		}
	}
	e.kernel = timed
	return nil
}

// owners are the service ports that a line of a script is about.
func (m *model) owners(line string) []changetracker.ServicePortName {
	command, rest, _ := strings.Cut(line, " ")
	chain, text, _ := strings.Cut(rest, " ")
	if command != "-A" {
		chain, _, _ = strings.Cut(strings.TrimPrefix(line, ":"), " ")
		text = ""
	}
	has := func(l leaf) bool { return text != "" && slices.Contains(l.rules, rule(text)) }
	var names []changetracker.ServicePortName
	for name, p := range m.placed {
		if _, ok := p.chains[chain]; ok || slices.ContainsFunc(p.nat, has) || slices.ContainsFunc(p.filter, has) {
			names = append(names, name)
		}
	}
	return names
}

// same says that two service ports need the same.
func (p *placed) same(o *placed) bool {
	sameLeaf := func(a, b leaf) bool { return a.key == b.key && slices.Equal(a.rules, b.rules) }
	return maps.EqualFunc(p.chains, o.chains, slices.Equal[[]rule]) && slices.Equal(p.hairpin, o.hairpin) && p.health == o.health &&
		slices.EqualFunc(p.nat, o.nat, sameLeaf) && slices.EqualFunc(p.filter, o.filter, sameLeaf)
}
