package proxier

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
)

// Hybrid is an Engine that gives each service port to one of several engines of the
// same IP family: most to nftables, say, and to userspace those that are to be
// scaled from zero. A service port that goes from one to another is programmed there
// before it is taken away here.
//
// The engines must not stand in each other's way where both have the same service
// port for a moment. What Hybrid can do beside an Engine, those of its engines do that can.
type Hybrid struct {
	choose  func(s *desired.Service) string
	engines []HybridEngine
	// placed says which engine has a service port.
	placed map[changetracker.ServicePortName]int
}

// HybridEngine is one of the engines of a Hybrid.
type HybridEngine struct {
	Name   string
	Engine Engine
}

var _ interface {
	Engine
	Watcher
	Planner
	Dumper
	DescriptorHolder
	Owner
} = (*Hybrid)(nil)

// NewHybrid returns a Hybrid. choose names the engine of a service port, for example
// by its Port.Ext, which Options.DecorateService has filled from an annotation. It
// must be pure. A name that no engine has means the first one.
func NewHybrid(choose func(s *desired.Service) string, engines ...HybridEngine) (*Hybrid, error) {
	if choose == nil || len(engines) == 0 {
		return nil, fmt.Errorf("%w: Hybrid: want a way to choose and an engine at least", ErrInvalidConfig)
	}
	for i, e := range engines {
		if e.Engine == nil || slices.ContainsFunc(engines[:i], func(o HybridEngine) bool { return o.Name == e.Name }) {
			return nil, fmt.Errorf("%w: Hybrid: engine %q is missing, or named twice", ErrInvalidConfig, e.Name)
		}
	}
	return &Hybrid{choose: choose, engines: engines, placed: map[changetracker.ServicePortName]int{}}, nil
}

// Apply implements Engine. A service port that its new engine refuses stays with the
// one that has it.
func (h *Hybrid) Apply(ctx context.Context, update desired.Update) (Result, error) {
	first := h.updates(&update)
	moves := map[changetracker.ServicePortName]int{} // to where
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
		first[to].Changes = append(first[to].Changes, c)
		if known && from != to {
			moves[c.Name] = to
			if update.Full { // which would take it away at once
				first[from].Changes = append(first[from].Changes, c)
			}
			continue
		}
		h.placed[c.Name] = to
	}
	if update.Full {
		h.forgetOthers(&update)
	}
	return h.program(ctx, first, moves)
}

// updates are those of the engines, without service ports. The first engine is the one
// that has to do with addresses that no Service has.
func (h *Hybrid) updates(of *desired.Update) []desired.Update {
	updates := make([]desired.Update, len(h.engines))
	for i := range updates {
		updates[i] = desired.Update{Family: of.Family, Full: of.Full, Globals: of.Globals}
		if i > 0 {
			updates[i].Globals.ServiceCIDRs = nil
		}
	}
	return updates
}

// index is the engine of a service port.
func (h *Hybrid) index(s *desired.Service) int {
	name := h.choose(s)
	return max(0, slices.IndexFunc(h.engines, func(e HybridEngine) bool { return e.Name == name }))
}

// forgetOthers forgets what a full update does not have.
func (h *Hybrid) forgetOthers(update *desired.Update) {
	there := make(map[changetracker.ServicePortName]bool, len(update.Changes))
	for i := range update.Changes {
		there[update.Changes[i].Name] = true
	}
	maps.DeleteFunc(h.placed, func(name changetracker.ServicePortName, _ int) bool { return !there[name] })
}

// program applies the first updates, and then takes away what has moved.
func (h *Hybrid) program(ctx context.Context, first []desired.Update, moves map[changetracker.ServicePortName]int) (Result, error) {
	total := Result{FlowEnds: map[changetracker.ServicePortName][]netip.AddrPort{}}
	var errs []error
	failed := map[int]bool{}
	for i, u := range first {
		if u.Full || len(u.Changes) > 0 {
			result, err := h.engines[i].Engine.Apply(ctx, u)
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
	last := make([]desired.Update, len(h.engines))
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
			result, err := h.engines[i].Engine.Apply(ctx, u)
			h.add(&total, &result, i, nil)
			errs = append(errs, err)
		}
	}
	return total, errors.Join(errs...)
}

// add adds up what several engines did. Flows of a service port that moves end where it
// goes to.
func (h *Hybrid) add(total, o *Result, engine int, moves map[changetracker.ServicePortName]int) {
	total.Failed = append(total.Failed, o.Failed...)
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
	if o.Report.Tables != nil {
		r.Tables = o.Report.Tables
	}
}

// Traits implements Engine: those of the engine that a service port belongs to, and of
// the first one for addresses without a Service.
func (h *Hybrid) Traits(s *desired.Service) desired.Traits {
	if s == nil {
		return h.engines[0].Engine.Traits(nil)
	}
	return h.engines[h.index(s)].Engine.Traits(s)
}

// Descriptors implements DescriptorHolder: those of the first of its engines that has some.
func (h *Hybrid) Descriptors() Descriptors {
	for _, e := range h.engines {
		if holder, ok := As[DescriptorHolder](e.Engine); ok {
			return holder.Descriptors()
		}
	}
	return Descriptors{}
}

// Watch implements Watcher. It ends when ctx does, or the first of the engines'
// Watches that does not say errors.ErrUnsupported.
func (h *Hybrid) Watch(ctx context.Context, damaged func(Damage)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	able := make([]bool, len(h.engines))
	errs := make([]error, len(h.engines))
	var running sync.WaitGroup
	for i, e := range h.engines {
		if w, ok := As[Watcher](e.Engine); ok {
			running.Go(func() {
				err := w.Watch(ctx, damaged)
				if able[i] = !errors.Is(err, errors.ErrUnsupported); able[i] {
					errs[i] = err
					stop() // the others
				}
			})
		}
	}
	running.Wait()
	if !slices.Contains(able, true) {
		return fmt.Errorf("watch: %w by any engine of this Hybrid", errors.ErrUnsupported)
	}
	return errors.Join(errs...)
}

// Plan implements Planner: the plans of those engines that can tell, each under its name.
func (h *Hybrid) Plan(update desired.Update) (string, error) {
	parts := h.updates(&update)
	for s := range update.Services() {
		to := h.index(s)
		parts[to].Changes = append(parts[to].Changes, desired.Change{Name: s.Name, After: s})
	}
	var text strings.Builder
	err := h.each("plan", func(i int, e Engine) (bool, error) {
		p, ok := As[Planner](e)
		if !ok {
			return false, nil
		}
		plan, err := p.Plan(parts[i])
		text.WriteString(h.title(i) + plan)
		return true, err
	})
	return text.String(), err
}

// Dump implements Dumper: what those engines print that can, each under its name.
func (h *Hybrid) Dump(ctx context.Context, w io.Writer) error {
	return h.each("dump", func(i int, e Engine) (bool, error) {
		d, ok := As[Dumper](e)
		if !ok {
			return false, nil
		}
		_, err := io.WriteString(w, h.title(i))
		return true, errors.Join(err, d.Dump(ctx, w))
	})
}

func (h *Hybrid) title(i int) string { return "# " + h.engines[i].Name + "\n" }

// each asks all engines, of which one at least must be able to.
func (h *Hybrid) each(what string, ask func(i int, e Engine) (able bool, err error)) error {
	var errs []error
	anyAble := false
	for i, e := range h.engines {
		able, err := ask(i, e.Engine)
		if anyAble = anyAble || able; err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", e.Name, err))
		}
	}
	if !anyAble {
		return fmt.Errorf("%s: %w by any engine of this Hybrid", what, errors.ErrUnsupported)
	}
	return errors.Join(errs...)
}

// Cleanup implements Engine: it cleans up all engines.
func (h *Hybrid) Cleanup(ctx context.Context) error {
	clear(h.placed)
	return h.each("clean up", func(_ int, e Engine) (bool, error) { return true, e.Cleanup(ctx) })
}

// Close implements Engine: it closes all engines.
func (h *Hybrid) Close() error {
	return h.each("close", func(_ int, e Engine) (bool, error) { return true, e.Close() })
}

// OwnsNames implements Owner: if any of the engines does.
func (h *Hybrid) OwnsNames() bool {
	return slices.ContainsFunc(h.engines, func(e HybridEngine) bool { return ownsNames(e.Engine) })
}
