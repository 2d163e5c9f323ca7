package hybrid

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/connection"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/proxier"
)

// Engine is a proxier.Engine that assigns each service port to one of its members. Its abilities use the
// members that have them.
type Engine struct {
	choose  func(s *desired.Service) string
	members []Member
	can     []proxier.Abilities // of the members
	// placed is the index of the member that has programmed a service port.
	placed map[changetracker.ServicePortName]int
}

// Member is one of the engines, with a name that is unique among them.
type Member struct {
	Name   string
	Engine proxier.Engine
}

var _ proxier.Engine = (*Engine)(nil)

// New returns an Engine. choose returns the name of the member for a service port, for
// example from its Port.Ext, which Options.DecorateService has set from an annotation. It
// must be pure. An unknown name means the first member.
func New(choose func(s *desired.Service) string, members ...Member) (*Engine, error) {
	if choose == nil || len(members) == 0 {
		return nil, fmt.Errorf("%w: hybrid: choose is nil or there are no members", proxier.ErrInvalidConfig)
	}
	h := &Engine{choose: choose, members: members, placed: map[changetracker.ServicePortName]int{}}
	for i, e := range members {
		if e.Engine == nil || slices.ContainsFunc(members[:i], func(o Member) bool { return o.Name == e.Name }) {
			return nil, fmt.Errorf("%w: hybrid: member %q has no engine or is listed twice", proxier.ErrInvalidConfig, e.Name)
		}
		h.can = append(h.can, e.Engine.Abilities())
	}
	return h, nil
}

// Apply implements proxier.Engine. If the new member of a service port fails to program it,
// the service port stays with the old one.
func (h *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	first := h.updates(&update)
	moves := map[changetracker.ServicePortName]move{}
	for _, c := range update.Changes {
		from, known := h.placed[c.Name]
		if c.After == nil {
			if known {
				first[from].Changes = append(first[from].Changes, c)
				delete(h.placed, c.Name)
			}
			continue
		}
		to := h.index(c.After)
		if !known || from == to {
			first[to].Changes = append(first[to].Changes, c)
			h.placed[c.Name] = to
			continue
		}
		moves[c.Name] = move{to, c.Before}
		if update.Full { // without it the old member would remove the service port too early
			first[from].Changes = append(first[from].Changes, c)
		} else {
			c.Source = asNew(&c, update.Now)
		}
		c.Before = nil
		first[to].Changes = append(first[to].Changes, c)
	}
	if update.Full {
		h.unplaceRemoved(&update)
	}
	return h.program(ctx, first, moves)
}

// move is that of a service port to another member, from one that has it.
type move struct {
	to  int
	had *desired.Service
}

// asNew returns the change of a new service port, for one that moves: its new member has
// none of its endpoints.
func asNew(c *desired.Change, now *desired.Resolved) *changetracker.Change {
	source := &changetracker.Change{Name: c.Name, After: c.After.Port}
	if now != nil {
		source.Added = now.View().State().Endpoints(c.Name)
	}
	return source
}

// updates returns an Update without service ports for each member. Only the first member
// handles addresses without a Service.
func (h *Engine) updates(of *desired.Update) []desired.Update {
	updates := make([]desired.Update, len(h.members))
	for i := range updates {
		updates[i] = desired.Update{Family: of.Family, Full: of.Full, Gone: of.Gone, Was: of.Was, Now: of.Now, Globals: of.Globals}
		if i > 0 {
			updates[i].Globals.ServiceCIDRs = nil
		}
	}
	return updates
}

// index returns the chosen member of a service port.
func (h *Engine) index(s *desired.Service) int {
	name := h.choose(s)
	return max(0, slices.IndexFunc(h.members, func(e Member) bool { return e.Name == name }))
}

// unplaceRemoved deletes the service ports from placed that a full update does not have.
func (h *Engine) unplaceRemoved(update *desired.Update) {
	exists := make(map[changetracker.ServicePortName]bool, len(update.Changes))
	for i := range update.Changes {
		exists[update.Changes[i].Name] = true
	}
	maps.DeleteFunc(h.placed, func(name changetracker.ServicePortName, _ int) bool { return !exists[name] })
}

// program applies the first updates, and then removes the moved service ports from their
// old members.
func (h *Engine) program(ctx context.Context, first []desired.Update, moves map[changetracker.ServicePortName]move) (proxier.Result, error) {
	total := proxier.Result{FlowEnds: map[changetracker.ServicePortName][]netip.AddrPort{}}
	var errs []error
	failed := map[int]bool{}
	for i, u := range first {
		if u.Full || len(u.Changes) > 0 {
			result, err := h.members[i].Engine.Apply(ctx, u)
			h.add(&total, &result, i, moves)
			for _, e := range result.Failed {
				if m, moving := moves[e.Name]; moving && m.to == i {
					delete(moves, e.Name)
				}
			}
			failed[i] = err != nil
			errs = append(errs, err)
		}
	}
	last := make([]desired.Update, len(h.members))
	for name, m := range moves {
		from := h.placed[name]
		if failed[m.to] || failed[from] {
			continue // the next update is full
		}
		h.placed[name] = m.to
		last[from].Changes = append(last[from].Changes, desired.Change{Name: name, Before: m.had})
	}
	for i, u := range last {
		if len(u.Changes) > 0 {
			u.Family, u.Globals = first[i].Family, first[i].Globals
			slices.SortFunc(u.Changes, func(a, b desired.Change) int { return a.Name.Compare(b.Name) })
			result, err := h.members[i].Engine.Apply(ctx, u)
			h.add(&total, &result, i, nil)
			errs = append(errs, err)
		}
	}
	return total, errors.Join(errs...)
}

// add adds the result of a member to the total. Flows of a service port that moves end at
// its new member.
func (h *Engine) add(total, o *proxier.Result, engine int, moves map[changetracker.ServicePortName]move) {
	total.Failed = append(total.Failed, o.Failed...)
	total.Limited = append(total.Limited, o.Limited...)
	total.Left = append(total.Left, o.Left...)
	for name, ends := range o.FlowEnds {
		if m, moving := moves[name]; !moving || m.to == engine {
			total.FlowEnds[name] = ends
		}
	}
	r := &total.Report
	r.Writes += o.Report.Writes
	r.Transactions += o.Report.Transactions
	r.Bytes += o.Report.Bytes
	r.Kernel += o.Report.Kernel
	if o.Report.Rules != nil {
		r.Rules, r.RulesWritten = o.Report.Rules, o.Report.RulesWritten
	}
}

// Traits implements proxier.Engine. It returns those of the service port's member, and those
// of the first member for addresses without a Service.
func (h *Engine) Traits(s *desired.Service) desired.Traits {
	if s == nil {
		return h.members[0].Engine.Traits(nil)
	}
	return h.members[h.index(s)].Engine.Traits(s)
}

// Abilities implements proxier.Engine: each uses the members that have it. Plan and Dump have a title for each
// member. A service port that moves to another member begins to count at zero. Descriptors are those of the
// first member that counts them.
func (h *Engine) Abilities() (can proxier.Abilities) {
	for _, of := range h.can {
		can.OwnsNames = can.OwnsNames || of.OwnsNames
		if of.Watch != nil {
			can.Watch = h.watch
		}
		if of.Plan != nil {
			can.Plan = h.plan
		}
		if of.Dump != nil {
			can.Dump = h.dump
		}
		if of.Counts != nil {
			can.Counts = h.counts
		}
		if of.Verify != nil {
			can.Verify = h.verify
		}
		if of.Conditions != nil {
			can.Conditions = h.conditions
		}
		if of.Lingers != nil {
			can.Lingers = h.lingers
		}
		if can.Descriptors == nil {
			can.Descriptors = of.Descriptors
		}
	}
	return can
}

func (h *Engine) lingers(endpoint netip.AddrPort) string {
	for _, can := range h.can {
		if can.Lingers != nil {
			if why := can.Lingers(endpoint); why != "" {
				return why
			}
		}
	}
	return ""
}

func (h *Engine) conditions() (all []proxier.Condition) {
	for _, can := range h.can {
		if can.Conditions != nil {
			all = append(all, can.Conditions()...)
		}
	}
	return all
}

// watch returns when ctx ends, or when the Watch of a member returns another error than
// errors.ErrUnsupported.
func (h *Engine) watch(ctx context.Context, damaged func(proxier.Damage)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	able := make([]bool, len(h.members))
	errs := make([]error, len(h.members))
	var running sync.WaitGroup
	for i, can := range h.can {
		if can.Watch != nil {
			running.Go(func() {
				err := can.Watch(ctx, damaged)
				if able[i] = !errors.Is(err, errors.ErrUnsupported); able[i] {
					errs[i] = err
					stop() // stops the other members
				}
			})
		}
	}
	running.Wait()
	if !slices.Contains(able, true) {
		return fmt.Errorf("watch: %w by all engines of this hybrid", errors.ErrUnsupported)
	}
	return errors.Join(errs...)
}

func (h *Engine) plan(update desired.Update) (string, error) {
	parts := h.parts(&update)
	var text strings.Builder
	err := h.each(func(i int) error {
		if h.can[i].Plan == nil {
			return nil
		}
		plan, err := h.can[i].Plan(parts[i])
		text.WriteString(h.title(i) + plan)
		return err
	})
	return text.String(), err
}

func (h *Engine) dump(ctx context.Context, w io.Writer) error {
	return h.each(func(i int) error {
		if h.can[i].Dump == nil {
			return nil
		}
		_, err := io.WriteString(w, h.title(i))
		return errors.Join(err, h.can[i].Dump(ctx, w))
	})
}

func (h *Engine) counts(ctx context.Context) (all connection.Counts, err error) {
	counted := false
	err = h.each(func(i int) error {
		if h.can[i].Counts == nil {
			return nil
		}
		counts, err := h.can[i].Counts(ctx)
		if errors.Is(err, errors.ErrUnsupported) {
			return nil
		}
		all, counted = counting.Sum(all, counts), true
		return err
	})
	if !counted {
		return all, fmt.Errorf("count connections: %w by all engines of this hybrid", errors.ErrUnsupported)
	}
	return all, err
}

// parts is a full Update for each member, with the service ports that it should have.
func (h *Engine) parts(update *desired.Update) []desired.Update {
	parts := h.updates(update)
	for s := range update.Services() {
		to := h.index(s)
		parts[to].Changes = append(parts[to].Changes, desired.Change{Name: s.Name, After: s})
	}
	return parts
}

func (h *Engine) verify(ctx context.Context, update desired.Update) (total proxier.Verification, err error) {
	parts := h.parts(&update)
	err = h.each(func(i int) error {
		if h.can[i].Verify == nil {
			return nil
		}
		report, err := h.can[i].Verify(ctx, parts[i])
		total.Checked += report.Checked
		total.Differences = append(total.Differences, report.Differences...)
		return err
	})
	return total, err
}

func (h *Engine) title(i int) string { return "# " + h.members[i].Name + "\n" }

// each calls a function for all members.
func (h *Engine) each(call func(i int) error) error {
	var errs []error
	for i, m := range h.members {
		if err := call(i); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", m.Name, err))
		}
	}
	return errors.Join(errs...)
}

// Cleanup implements proxier.Engine: it cleans up all members.
func (h *Engine) Cleanup(ctx context.Context) error {
	clear(h.placed)
	return h.each(func(i int) error { return h.members[i].Engine.Cleanup(ctx) })
}

// Close implements proxier.Engine: it closes all members.
func (h *Engine) Close() error {
	return h.each(func(i int) error { return h.members[i].Engine.Close() })
}
