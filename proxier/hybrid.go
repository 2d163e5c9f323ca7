package proxier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
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
// port for a moment. Hybrid is a Watcher, a Reporter, a DescriptorHolder and an
// io.Closer for those of its engines that are.
type Hybrid struct {
	choose  func(s *desired.Service) string
	engines []HybridEngine
	// placed says which engine has a service port.
	placed map[changetracker.ServicePortName]int
	report ApplyReport
}

// HybridEngine is one of the engines of a Hybrid.
type HybridEngine struct {
	Name   string
	Engine Engine
}

var _ interface {
	Engine
	Watcher
	Relay
	Reporter
	DescriptorHolder
	Owner
	io.Closer
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
func (h *Hybrid) Apply(ctx context.Context, update desired.Update) error {
	h.report = ApplyReport{}
	first := make([]desired.Update, len(h.engines))
	for i := range first {
		first[i] = desired.Update{Family: update.Family, Full: update.Full, Globals: update.Globals}
		if i > 0 {
			first[i].Globals.ServiceCIDRs = nil
		}
	}
	moves := map[changetracker.ServicePortName]int{} // to where
	for _, s := range update.Services {
		to := h.index(s)
		first[to].Services = append(first[to].Services, s)
		from, known := h.placed[s.Name]
		if known && from != to {
			moves[s.Name] = to
			if update.Full { // which would take it away at once
				first[from].Services = append(first[from].Services, s)
			}
			continue
		}
		h.placed[s.Name] = to
	}
	for _, name := range update.Removed {
		if at, known := h.placed[name]; known {
			first[at].Removed = append(first[at].Removed, name)
			delete(h.placed, name)
		}
	}
	if update.Full {
		h.forgetOthers(&update)
	}
	return h.program(ctx, first, moves)
}

// index is the engine of a service port.
func (h *Hybrid) index(s *desired.Service) int {
	name := h.choose(s)
	return max(0, slices.IndexFunc(h.engines, func(e HybridEngine) bool { return e.Name == name }))
}

// forgetOthers forgets what a full update does not have.
func (h *Hybrid) forgetOthers(update *desired.Update) {
	there := make(map[changetracker.ServicePortName]bool, len(update.Services))
	for _, s := range update.Services {
		there[s.Name] = true
	}
	maps.DeleteFunc(h.placed, func(name changetracker.ServicePortName, _ int) bool { return !there[name] })
}

// program applies the first updates, and then takes away what has moved.
func (h *Hybrid) program(ctx context.Context, first []desired.Update, moves map[changetracker.ServicePortName]int) error {
	var errs []error
	failed := map[int]bool{}
	for i, u := range first {
		if u.Full || len(u.Services)+len(u.Removed) > 0 {
			err := h.apply(ctx, i, u)
			errs = append(errs, err)
			refused, rest := SplitErrors(err)
			failed[i] = rest != nil
			for _, e := range refused {
				if to, moving := moves[e.Name]; moving && to == i {
					delete(moves, e.Name)
				}
			}
		}
	}
	last := make([]desired.Update, len(h.engines))
	for name, to := range moves {
		from := h.placed[name]
		if failed[to] || failed[from] {
			continue // the next update is full
		}
		h.placed[name] = to
		last[from].Removed = append(last[from].Removed, name)
	}
	for i, u := range last {
		if len(u.Removed) > 0 {
			u.Family, u.Globals = first[i].Family, first[i].Globals
			slices.SortFunc(u.Removed, changetracker.ServicePortName.Compare)
			errs = append(errs, h.apply(ctx, i, u))
		}
	}
	return errors.Join(errs...)
}

func (h *Hybrid) apply(ctx context.Context, i int, u desired.Update) error {
	err := h.engines[i].Engine.Apply(ctx, u)
	if r, ok := h.engines[i].Engine.(Reporter); ok {
		h.report.add(r.LastApply())
	}
	return err
}

// add adds up what several engines did.
func (r *ApplyReport) add(o ApplyReport) {
	r.Writes += o.Writes
	r.Transactions += o.Transactions
	r.Bytes += o.Bytes
	r.Kernel += o.Kernel
	if o.Tables != nil {
		r.Tables = o.Tables
	}
}

// Descriptors implements DescriptorHolder: those of the first of its engines that has some.
func (h *Hybrid) Descriptors() Descriptors {
	for _, e := range h.engines {
		if holder, ok := e.Engine.(DescriptorHolder); ok {
			return holder.Descriptors()
		}
	}
	return Descriptors{}
}

// FlowEnds implements Relay.
func (h *Hybrid) FlowEnds(name changetracker.ServicePortName, servers []netip.AddrPort) []netip.AddrPort {
	at, placed := h.placed[name]
	if !placed {
		return servers
	}
	if r, ok := h.engines[at].Engine.(Relay); ok {
		return r.FlowEnds(name, servers)
	}
	return servers
}

// LastApply implements Reporter.
func (h *Hybrid) LastApply() ApplyReport { return h.report }

// Watch implements Watcher. It ends when ctx does, or the first of the engines'
// Watches.
func (h *Hybrid) Watch(ctx context.Context, damaged func(Damage)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make([]error, len(h.engines))
	var running sync.WaitGroup
	for i, e := range h.engines {
		if w, ok := e.Engine.(Watcher); ok {
			running.Go(func() {
				defer stop()
				errs[i] = w.Watch(ctx, damaged)
			})
		}
	}
	<-ctx.Done()
	running.Wait()
	return errors.Join(errs...)
}

// Cleanup implements Engine: it cleans up all engines.
func (h *Hybrid) Cleanup(ctx context.Context) error {
	clear(h.placed)
	var errs []error
	for _, e := range h.engines {
		if err := e.Engine.Cleanup(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", e.Name, err))
		}
	}
	return errors.Join(errs...)
}

// Close closes all engines that can be closed.
func (h *Hybrid) Close() error {
	var errs []error
	for _, e := range h.engines {
		if c, ok := e.Engine.(io.Closer); ok {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// OwnsNames implements Owner: if any of the engines does.
func (h *Hybrid) OwnsNames() bool {
	return slices.ContainsFunc(h.engines, func(e HybridEngine) bool { return ownsNames(e.Engine) })
}
