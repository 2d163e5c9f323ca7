package iptables

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

func (e *engine) apply(ctx context.Context, update *desired.Update) error {
	if err := e.connect(ctx); err != nil {
		return err
	}
	trusted := e.trusted
	e.trusted = false // until this update has succeeded
	if !update.Full && (!trusted || !e.sameGlobals(&update.Globals)) {
		return proxier.ErrNotFull
	}
	if err := e.beginTally(ctx); err != nil {
		return err
	}
	if update.Full {
		e.model = e.newModel(update.Globals)
	}
	e.model.globals = update.Globals
	e.updated, e.refused = map[changetracker.ServicePortName]step{}, nil
	for name := range update.Removed() {
		e.set(name, nil)
	}
	for s := range update.Services() {
		e.set(s.Name, e.model.planPort(s))
	}
	if err := e.write(ctx, update.Full); err != nil {
		return err
	}
	e.totals.applied(update, e.model)
	e.trusted = true
	return e.allowLocalnet()
}

// sameGlobals reports whether g changes no chain.
func (e *engine) sameGlobals(g *desired.Globals) bool {
	was := &e.model.globals
	return was.SameDetection(g) && slices.Equal(was.PodCIDRs, g.PodCIDRs) && slices.Equal(was.NodePortAddresses, g.NodePortAddresses)
}

// set gives the model the plan of a service port; nil removes it.
func (e *engine) set(name changetracker.ServicePortName, p *portPlan) {
	if p != nil {
		e.updated[name] = step{before: e.model.ports[name], after: p}
	}
	e.totals.own(name, p)
	e.model.set(name, p)
}

// writeOnce runs iptables-restore once and returns its input. If another program has
// changed the tables, it reads and writes everything.
func (e *engine) writeOnce(ctx context.Context, everything bool) (text string, err error) {
	intact, err := e.guard.check(everything)
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
		if err := e.guard.during(s.chains, func() error { return e.kernel.restore(ctx, s.b.Bytes()) }); err != nil {
			return s.b.String(), err
		}
		e.record(want)
	}
	e.report.Rules, e.report.RulesWritten = maps.Clone(e.rules), s.rules
	if err := e.guard.wrote(e.effectOf(s, everything)); err != nil {
		return "", err
	}
	e.addDeleted()
	return "", nil
}

// compose returns the script to run, and the chains that it changes.
func (e *engine) compose(ctx context.Context, everything bool) (s *script, want map[string]ruleset, err error) {
	if everything {
		return e.composeFull(ctx)
	}
	want = e.model.changedChains()
	nat := changeOf(e.have[tableNAT], want[tableNAT], false)
	return compose(nat, changeOf(e.have[tableFilter], want[tableFilter], true)), want, nil
}

// composeFull reads both tables and compares them with the model.
func (e *engine) composeFull(ctx context.Context) (s *script, want map[string]ruleset, err error) {
	want = e.model.allChains()
	changes, left := map[string]*change{}, e.have
	e.have, e.rules, e.jumps = map[string]ruleset{}, map[string]int{}, map[string]ruleset{}
	for _, table := range []string{tableNAT, tableFilter} {
		o, err := observe(ctx, e.kernel, table, e.model.names)
		if err != nil {
			return nil, nil, err
		}
		if e.guard.intact && !e.isAsLeft(table, left[table], &o) { // since the last check
			e.guard.record(&proxier.Damage{})
		}
		e.have[table], e.rules[table] = o.chains, o.chains.count()
		if table == tableFilter {
			if err := e.completeLocalnet(&o, want[table]); err != nil {
				return nil, nil, err
			}
		}
		if table == tableNAT && left[table] == nil {
			e.left = frontendsLeft(o.chains, want[table])
		}
		o.discard(want[table])
		c := changeOf(o.chains, want[table], table == tableFilter)
		c.first.deletes, c.first.inserts, e.jumps[table] = repairJumps(e.model.jumps()[table], o.jumps)
		changes[table] = c
	}
	return compose(changes[tableNAT], changes[tableFilter]), want, nil
}

// completeLocalnet adds the rules that keep other hosts from loopback addresses.
func (e *engine) completeLocalnet(o *observed, want ruleset) error {
	chain := e.model.names.localnet()
	rules, err := e.localnet.rules(o.chains[chain], e.model.localhost())
	if err != nil {
		return err
	}
	if e.model.keepsLocalnet = rules != nil; e.model.keepsLocalnet {
		want[chain] = rules
	}
	return nil
}

// allowLocalnet sets route_localnet if node ports are accepted on loopback addresses. If the rules
// that keep other hosts out do not include the record, it leaves the setting alone, and the tables
// count as changed, so that Watch requests a full sync.
func (e *engine) allowLocalnet() error {
	if !e.model.localhost() {
		return nil
	}
	if all, err := e.localnet.read(); err != nil || all {
		return err
	}
	if !slices.Contains(e.have[tableFilter][e.model.names.localnet()], localnetRecord) {
		e.guard.record(&proxier.Damage{})
		return nil
	}
	if err := e.localnet.write("1", "kernel setting changed"); err != nil {
		return fmt.Errorf("change kernel setting: %w", err)
	}
	e.localnet.isOurs = true
	return nil
}

// record updates have and rules after a write.
func (e *engine) record(want map[string]ruleset) {
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

// effectOf returns the state that a script has left.
func (e *engine) effectOf(s *script, isFull bool) *effect {
	written := map[chainID][]rule{}
	for id := range s.chains {
		written[id] = e.have[id.table][id.chain]
		if jumps, ok := e.jumps[id.table][id.chain]; ok {
			written[id] = jumps
		}
	}
	return &effect{s.tables, written, e.have, e.jumps, isFull}
}

// Apply implements proxier.Engine.
func (e *engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	defer e.wakeWatch() // after mu is unlocked
	e.mu.Lock()
	defer e.mu.Unlock()
	e.report = proxier.ApplyReport{}
	err := e.apply(ctx, &update)
	result := proxier.Result{Failed: e.refused, Report: e.report, Left: e.left}
	if err == nil {
		e.left = nil
	}
	return result, err
}

func (e *engine) wakeWatch() {
	select {
	case e.written <- struct{}{}:
	default:
	}
}
