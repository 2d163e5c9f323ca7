package hybrid

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// engine is the Engine of New.
type engine struct {
	choose  func(s *desired.Service, kind desired.Kind) string
	members []Member
	can     []proxier.Abilities // of the members
	placed  map[changetracker.ServicePortName]placement
}

// Member is one of the engines, with a name that is unique among them.
type Member struct {
	Name   string
	Engine proxier.Engine
}

var _ proxier.Engine = (*engine)(nil)

// New returns an Engine that assigns the frontends of each service port to its members. choose returns the name
// of the member for the frontends of a kind of a service port, for example from its Port.Ext, which
// Tracker.DecorateService has set from an annotation. It must be pure. An unknown name means the first member.
//
// If the new member of a frontend fails to program its service port, the frontend stays with the old one. The
// abilities use the members that have them: Plan and Dump have a title for each member, a service port that
// moves to another member begins to count at zero, and Descriptors are those of the first member that counts
// them. Traits are those of the member that has the first frontend (ClientLimits: of all that have limited ones), and of the first member for addresses
// without a Service. Cleanup and Close are for all members.
func New(choose func(s *desired.Service, kind desired.Kind) string, members ...Member) (proxier.Engine, error) {
	if choose == nil || len(members) == 0 || len(members) > mostMembers {
		return nil, fmt.Errorf("%w: hybrid: choose is nil, or there are not 1 to %d members", proxier.ErrInvalidConfig, mostMembers)
	}
	h := &engine{choose: choose, members: members, placed: map[changetracker.ServicePortName]placement{}}
	for i, e := range members {
		if e.Engine == nil || slices.ContainsFunc(members[:i], func(o Member) bool { return o.Name == e.Name }) {
			return nil, fmt.Errorf("%w: hybrid: member %q has no engine or is listed twice", proxier.ErrInvalidConfig, e.Name)
		}
		h.can = append(h.can, e.Engine.Abilities())
	}
	return h, nil
}

// Apply implements proxier.Engine.
func (h *engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	first := h.updates(&update)
	moves := map[changetracker.ServicePortName]move{}
	placed := h.placed
	if update.Full {
		placed = make(map[changetracker.ServicePortName]placement, len(update.Changes))
	}
	for i := range update.Changes {
		c := &update.Changes[i]
		was, now := h.placed[c.Name], h.placementOf(c.After)
		both := with{was.onlyWhere(now), now}
		for i := range h.members {
			if was.has(i) || now.has(i) {
				first[i].Changes = append(first[i].Changes, both.part(c, i, was, &update))
			}
		}
		switch {
		case c.After == nil:
			delete(placed, c.Name)
		case both.leavers() != 0:
			moves[c.Name] = move{c, both}
			placed[c.Name] = both.was.or(now)
		default:
			placed[c.Name] = now
		}
	}
	h.placed = placed
	return h.program(ctx, first, moves)
}

// move is the move of frontends of a service port from one member to another.
type move struct {
	change *desired.Change
	with
}

// updates returns an Update without service ports for each member. Only the first member
// handles addresses without a Service.
func (h *engine) updates(of *desired.Update) []desired.Update {
	updates := make([]desired.Update, len(h.members))
	for i := range updates {
		updates[i] = desired.Update{Family: of.Family, Full: of.Full, Gone: of.Gone, Was: of.Was, Now: of.Now, Globals: of.Globals}
		if i > 0 {
			updates[i].Globals.ServiceCIDRs = nil
		}
	}
	return updates
}

// program applies the first updates, in which old members still have what moves, and then the last ones.
func (h *engine) program(ctx context.Context, first []desired.Update, moves map[changetracker.ServicePortName]move) (proxier.Result, error) {
	total := proxier.Result{FlowEnds: map[changetracker.ServicePortName][]netip.AddrPort{}}
	var errs []error
	for i, u := range first {
		if u.Full || len(u.Changes) > 0 {
			errs = append(errs, h.applyTo(ctx, i, u, &total, moves))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return total, err // the next update is full
	}
	for i, u := range h.givenUp(first, moves) {
		if len(u.Changes) > 0 {
			slices.SortFunc(u.Changes, func(a, b desired.Change) int { return a.Name.Compare(b.Name) })
			errs = append(errs, h.applyTo(ctx, i, u, &total, nil))
		}
	}
	return total, errors.Join(errs...)
}

// applyTo applies an update to a member, and adds the result to the total. What it fails to get does not move.
func (h *engine) applyTo(ctx context.Context, member int, u desired.Update, total *proxier.Result, moves map[changetracker.ServicePortName]move) error {
	result, err := h.members[member].Engine.Apply(ctx, u)
	h.add(total, &result, member, moves)
	for _, e := range result.Failed {
		h.mayHave(e.Name, member)
		if moves[e.Name].now.has(member) {
			delete(moves, e.Name)
		}
	}
	return err
}

// givenUp returns the updates in which members give up what has moved.
func (h *engine) givenUp(first []desired.Update, moves map[changetracker.ServicePortName]move) []desired.Update {
	last := make([]desired.Update, len(h.members))
	for i, of := range first {
		last[i] = desired.Update{Family: of.Family, Was: of.Was, Now: of.Now, Globals: of.Globals}
	}
	for name, m := range moves {
		h.placed[name] = m.now
		for i := range h.members {
			if m.leavers()&bit(i) != 0 {
				left := with{now: m.now}
				last[i].Changes = append(last[i].Changes, desired.Change{Name: name, Before: m.of(m.change.After, i), After: left.of(m.change.After, i)})
			}
		}
	}
	return last
}

// mayHave records that a member may have anything of a service port.
func (h *engine) mayHave(name changetracker.ServicePortName, member int) {
	p := h.placed[name]
	p[0] |= bit(member)
	h.placed[name] = p
}

// add adds the result of a member to the total. Flows of a service port that moves end at
// its new member.
func (h *engine) add(total, o *proxier.Result, engine int, moves map[changetracker.ServicePortName]move) {
	total.Failed = append(total.Failed, o.Failed...)
	total.Limited = append(total.Limited, o.Limited...)
	total.Left = append(total.Left, o.Left...)
	for name, ends := range o.FlowEnds {
		if m, moving := moves[name]; !moving || m.now.has(engine) {
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

// Traits implements proxier.Engine.
func (h *engine) Traits(s *desired.Service) desired.Traits {
	if s == nil {
		return h.members[0].Engine.Traits(nil)
	}
	of := func(kind desired.Kind) desired.Traits { return h.members[h.index(s, kind)].Engine.Traits(s) }
	t := of(kindsOf(s)[0])
	for i := range s.Frontends {
		if f := &s.Frontends[i]; !s.ClientLimit(f).IsZero() {
			if t.ClientLimits = of(f.Kind).ClientLimits; !t.ClientLimits {
				break
			}
		}
	}
	return t
}

// Abilities implements proxier.Engine: see New.
func (h *engine) Abilities() (can proxier.Abilities) {
	can.Part = h.can[0].Part
	for _, of := range h.can {
		can.OwnsNames = can.OwnsNames || of.OwnsNames
		can.Part = min(can.Part, of.Part) // 0: an Update of this member costs more than what changes
		set(&can.Watch, h.watch, of.Watch != nil)
		set(&can.Plan, h.plan, of.Plan != nil)
		set(&can.Dump, h.dump, of.Dump != nil)
		set(&can.Counts, h.counts, of.Counts != nil)
		set(&can.Verify, h.verify, of.Verify != nil)
		set(&can.Conditions, h.conditions, of.Conditions != nil)
		set(&can.Lingers, h.lingers, of.Lingers != nil)
		if can.Descriptors == nil {
			can.Descriptors = of.Descriptors
		}
	}
	return can
}

func set[F any](ability *F, ours F, has bool) {
	if has {
		*ability = ours
	}
}

func (h *engine) lingers(endpoint netip.AddrPort) string {
	for _, can := range h.can {
		if can.Lingers != nil {
			if why := can.Lingers(endpoint); why != "" {
				return why
			}
		}
	}
	return ""
}

func (h *engine) conditions() (all []proxier.Condition) {
	for _, can := range h.can {
		if can.Conditions != nil {
			all = append(all, can.Conditions()...)
		}
	}
	return all
}

// watch returns when ctx ends, or when the Watch of a member returns another error than
// errors.ErrUnsupported.
func (h *engine) watch(ctx context.Context, damaged func(proxier.Damage)) error {
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

func (h *engine) plan(update desired.Update) (string, error) {
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

func (h *engine) dump(ctx context.Context, w io.Writer) error {
	return h.each(func(i int) error {
		if h.can[i].Dump == nil {
			return nil
		}
		_, err := io.WriteString(w, h.title(i))
		return errors.Join(err, h.can[i].Dump(ctx, w))
	})
}

func (h *engine) counts(ctx context.Context) (all connection.Counts, err error) {
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

// parts is a full Update for each member, with the frontends that it should have.
func (h *engine) parts(update *desired.Update) []desired.Update {
	parts := h.updates(update)
	for s := range update.Services() {
		all := with{now: h.placementOf(s)}
		for i := range h.members {
			if all.now.has(i) {
				parts[i].Changes = append(parts[i].Changes, desired.Change{Name: s.Name, After: all.of(s, i)})
			}
		}
	}
	return parts
}

func (h *engine) verify(ctx context.Context, update desired.Update) (total proxier.Verification, err error) {
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

func (h *engine) title(i int) string { return "# " + h.members[i].Name + "\n" }

// each calls a function for all members.
func (h *engine) each(call func(i int) error) error {
	var errs []error
	for i, m := range h.members {
		if err := call(i); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", m.Name, err))
		}
	}
	return errors.Join(errs...)
}

// Cleanup implements proxier.Engine: it cleans up all members.
func (h *engine) Cleanup(ctx context.Context) error {
	clear(h.placed)
	return h.each(func(i int) error { return h.members[i].Engine.Cleanup(ctx) })
}

// Close implements proxier.Engine: it closes all members.
func (h *engine) Close() error {
	return h.each(func(i int) error { return h.members[i].Engine.Close() })
}
