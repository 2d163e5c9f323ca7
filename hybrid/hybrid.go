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
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// Engine is a proxier.Engine that assigns each service port to one of its members. Its
// other abilities, such as Watch, use the members that have them.
type Engine struct {
	choose  func(s *desired.Service) string
	members []Member
	// placed is the index of the member that has programmed a service port.
	placed map[changetracker.ServicePortName]int
}

// Member is one of the engines, with a name that is unique among them.
type Member struct {
	Name   string
	Engine proxier.Engine
}

var _ interface {
	proxier.Engine
	proxier.Watcher
	proxier.Planner
	proxier.Dumper
	proxier.Counter
	proxier.Verifier
} = (*Engine)(nil)

// New returns an Engine. choose returns the name of the member for a service port, for
// example from its Port.Ext, which Options.DecorateService has set from an annotation. It
// must be pure. An unknown name means the first member.
func New(choose func(s *desired.Service) string, members ...Member) (*Engine, error) {
	if choose == nil || len(members) == 0 {
		return nil, fmt.Errorf("%w: hybrid: choose is nil or there are no members", proxier.ErrInvalidConfig)
	}
	for i, e := range members {
		if e.Engine == nil || slices.ContainsFunc(members[:i], func(o Member) bool { return o.Name == e.Name }) {
			return nil, fmt.Errorf("%w: hybrid: member %q has no engine or is listed twice", proxier.ErrInvalidConfig, e.Name)
		}
	}
	return &Engine{choose: choose, members: members, placed: map[changetracker.ServicePortName]int{}}, nil
}

// Apply implements proxier.Engine. If the new member of a service port fails to program it,
// the service port stays with the old one.
func (h *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	first := h.updates(&update)
	moves := map[changetracker.ServicePortName]int{} // to this member
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
		if known && from != to && !update.Full {
			c.Source = asNew(&c, update.Now)
		}
		first[to].Changes = append(first[to].Changes, c)
		if known && from != to {
			moves[c.Name] = to
			if update.Full { // without it the old member would remove the service port too early
				first[from].Changes = append(first[from].Changes, c)
			}
			continue
		}
		h.placed[c.Name] = to
	}
	if update.Full {
		h.unplaceRemoved(&update)
	}
	return h.program(ctx, first, moves)
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
func (h *Engine) program(ctx context.Context, first []desired.Update, moves map[changetracker.ServicePortName]int) (proxier.Result, error) {
	total := proxier.Result{FlowEnds: map[changetracker.ServicePortName][]netip.AddrPort{}}
	var errs []error
	failed := map[int]bool{}
	for i, u := range first {
		if u.Full || len(u.Changes) > 0 {
			result, err := h.members[i].Engine.Apply(ctx, u)
			h.add(&total, &result, i, moves)
			for _, e := range result.Failed {
				if to, moving := moves[e.Name]; moving && to == i {
					delete(moves, e.Name)
				}
			}
			failed[i] = err != nil
			errs = append(errs, err)
		}
	}
	last := make([]desired.Update, len(h.members))
	for name, to := range moves {
		from := h.placed[name]
		if failed[to] || failed[from] {
			continue // the next update is full
		}
		h.placed[name] = to
		last[from].Changes = append(last[from].Changes, desired.Change{Name: name})
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
func (h *Engine) add(total, o *proxier.Result, engine int, moves map[changetracker.ServicePortName]int) {
	total.Failed = append(total.Failed, o.Failed...)
	total.Left = append(total.Left, o.Left...)
	for name, ends := range o.FlowEnds {
		if to, moving := moves[name]; !moving || to == engine {
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

// Descriptors returns those of the first member that counts them.
func (h *Engine) Descriptors() connection.Descriptors {
	for _, m := range h.members {
		if holder, ok := proxier.As[interface {
			Descriptors() connection.Descriptors
		}](m.Engine); ok {
			return holder.Descriptors()
		}
	}
	return connection.Descriptors{}
}

// Conditions returns those of all members.
func (h *Engine) Conditions() (all []proxier.Condition) {
	for _, m := range h.members {
		if e, ok := proxier.As[interface {
			Conditions() []proxier.Condition
		}](m.Engine); ok {
			all = append(all, e.Conditions()...)
		}
	}
	return all
}

// Watch implements proxier.Watcher. It returns when ctx ends, or when the Watch of a member
// returns another error than errors.ErrUnsupported.
func (h *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	able := make([]bool, len(h.members))
	errs := make([]error, len(h.members))
	var running sync.WaitGroup
	for i, e := range h.members {
		if w, ok := proxier.As[proxier.Watcher](e.Engine); ok {
			running.Go(func() {
				err := w.Watch(ctx, damaged)
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

// Plan implements proxier.Planner. It joins the plans of the members that have one, each
// under the member's name.
func (h *Engine) Plan(update desired.Update) (string, error) {
	parts := h.parts(&update)
	var text strings.Builder
	err := h.each("plan", func(i int, e proxier.Engine) (bool, error) {
		p, ok := proxier.As[proxier.Planner](e)
		if !ok {
			return false, nil
		}
		plan, err := p.Plan(parts[i])
		text.WriteString(h.title(i) + plan)
		return true, err
	})
	return text.String(), err
}

// Dump implements proxier.Dumper. It writes the dumps of the members that have one, each
// under the member's name.
func (h *Engine) Dump(ctx context.Context, w io.Writer) error {
	return h.each("dump", func(i int, e proxier.Engine) (bool, error) {
		d, ok := proxier.As[proxier.Dumper](e)
		if !ok {
			return false, nil
		}
		_, err := io.WriteString(w, h.title(i))
		return true, errors.Join(err, d.Dump(ctx, w))
	})
}

// Counts implements proxier.Counter. It joins the numbers of the members that count. A service
// port that moves to another member begins at zero.
func (h *Engine) Counts(ctx context.Context) (proxier.Counts, error) {
	var all proxier.Counts
	err := h.each("count connections", func(_ int, e proxier.Engine) (bool, error) {
		c, ok := proxier.As[proxier.Counter](e)
		if !ok {
			return false, nil
		}
		counts, err := c.Counts(ctx)
		if errors.Is(err, errors.ErrUnsupported) {
			return false, nil
		}
		all = counting.Sum(all, counts)
		return true, err
	})
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

// Verify implements proxier.Verifier. It joins the reports of the members that can verify.
func (h *Engine) Verify(ctx context.Context, update desired.Update) (total proxier.VerifyReport, err error) {
	parts := h.parts(&update)
	err = h.each("verify", func(i int, e proxier.Engine) (bool, error) {
		v, ok := proxier.As[proxier.Verifier](e)
		if !ok {
			return false, nil
		}
		report, err := v.Verify(ctx, parts[i])
		total.Checked += report.Checked
		total.Differences = append(total.Differences, report.Differences...)
		return true, err
	})
	return total, err
}

func (h *Engine) title(i int) string { return "# " + h.members[i].Name + "\n" }

// each calls a function for all members. At least one of them must be able to do it.
func (h *Engine) each(what string, call func(i int, e proxier.Engine) (able bool, err error)) error {
	var errs []error
	anyAble := false
	for i, e := range h.members {
		able, err := call(i, e.Engine)
		if anyAble = anyAble || able; err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", e.Name, err))
		}
	}
	if !anyAble {
		return fmt.Errorf("%s: %w by all engines of this hybrid", what, errors.ErrUnsupported)
	}
	return errors.Join(errs...)
}

// Cleanup implements proxier.Engine: it cleans up all members.
func (h *Engine) Cleanup(ctx context.Context) error {
	clear(h.placed)
	return h.each("clean up", func(_ int, e proxier.Engine) (bool, error) { return true, e.Cleanup(ctx) })
}

// Close implements proxier.Engine: it closes all members.
func (h *Engine) Close() error {
	return h.each("close", func(_ int, e proxier.Engine) (bool, error) { return true, e.Close() })
}

// OwnsNames reports whether any member writes objects with the instance's Names.
func (h *Engine) OwnsNames() bool {
	return slices.ContainsFunc(h.members, func(m Member) bool {
		owner, ok := proxier.As[interface{ OwnsNames() bool }](m.Engine)
		return ok && owner.OwnsNames()
	})
}
