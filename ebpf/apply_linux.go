package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

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
