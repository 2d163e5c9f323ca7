package changetracker

import (
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Tracker turns Services and EndpointSlices into States and Deltas. Feed it
// through Services and Endpoints; both may be called at any time, also while an
// Apply runs.
type Tracker struct {
	Services  *ServiceChangeTracker
	Endpoints *EndpointChangeTracker
	store     *store
}

// New returns an empty tracker. The error names every option that is not valid
// and wraps ErrInvalidOptions.
func New(o Options) (*Tracker, error) {
	s, err := newStore(o)
	if err != nil {
		return nil, err
	}
	return &Tracker{
		Services:  &ServiceChangeTracker{store: s},
		Endpoints: &EndpointChangeTracker{store: s},
		store:     s,
	}, nil
}

// Apply calls fn with the newest State of a family and the Delta to it from what was
// applied so far, and returns fn's error. It costs what changed, not what is tracked.
//
// When fn returns an error nothing is consumed: the next Delta starts from the same
// State, so that no change is lost. Without one the Delta is consumed, but for the
// service ports that are named in failed: they stay pending, with what they were
// before. Names that are not in the Delta are ignored. The first Delta is Full, and so
// are the next ones until fn succeeds, wholly or in part. Changes that cancel out do
// not show; fn is called even so.
//
// Events may arrive while fn runs; they wait for the next Apply. Calls for one
// family wait for each other, so fn must not call Apply for the same family.
// A family that is not tracked is ErrUnknownFamily.
func (t *Tracker) Apply(family v1.IPFamily, fn func(Step) (failed []ServicePortName, err error)) error {
	return t.store.apply(family, fn)
}

// SetNode replaces what is known of the node. Values that Options.Validate would
// refuse are left out. When it made a difference, the next Delta of each family
// is Full.
func (t *Tracker) SetNode(node Node) (changed bool) { return t.store.setNode(node) }

// PendingSince is when the oldest change arrived that no Apply has consumed, or
// the zero time when there is none. A change that another one has undone counts
// until the next Apply finds out. It is cheap, and zero for a family that is not
// tracked.
func (t *Tracker) PendingSince(family v1.IPFamily) time.Time { return t.store.waiting(family) }

// Problems are the values that are set aside at present, sorted by object and
// field.
func (t *Tracker) Problems() []Problem { return t.store.allProblems() }

// ProblemCounts counts the Problems by reason, without making a list of them.
func (t *Tracker) ProblemCounts() map[Reason]int { return t.store.problemCounts() }

// Counts says what there is and was to do. It costs what is pending.
func (t *Tracker) Counts() Counts { return t.store.counts() }

// Synced says that an Input is known: every Service, or every EndpointSlice, that exists
// has been given to the Tracker. SetNode says so of the node. A sync that comes before
// would take away what a proxy before this one has programmed.
func (t *Tracker) Synced(input Input) {
	t.store.mu.Lock()
	defer t.store.unlock()
	t.store.gate.known(input)
}

// Waiting lists the Inputs that are not known yet, sorted.
func (t *Tracker) Waiting() []Input {
	t.store.mu.Lock()
	defer t.store.mu.Unlock()
	return slices.Clone(t.store.gate.waiting)
}

// Ready is closed when all Inputs are known. Apply does not wait for it.
func (t *Tracker) Ready() <-chan struct{} { return t.store.gate.open }

// Changed receives a value when there is a change that no Apply has seen yet. Several
// changes may be one value: after receiving it, call Apply for each family. It is for
// programs with one goroutine that syncs; an Apply that fails is theirs to repeat. The
// channel is never closed.
func (t *Tracker) Changed() <-chan struct{} { return t.store.changed }

// Override puts an Override in the place of an earlier one of the endpoint; the zero
// value takes it away, and the endpoint is again exactly as slices say. It stays while
// slices or Endpoints.Set have the endpoint, also when they change it or when another
// slice brings it. It ends at an Apply, whatever its outcome, that finds the service
// port without the endpoint. So it may come before the endpoint does, if no Apply comes
// between.
//
// It is a change like any other, of that service port alone. changed says whether an
// Apply may see a difference. While a service port has overrides, changed of other calls
// may be true for a difference that an override hides.
func (t *Tracker) Override(name ServicePortName, addr netip.AddrPort, o Override) (changed bool) {
	if !addr.IsValid() {
		return false
	}
	s := t.store
	s.mu.Lock()
	defer s.unlock()
	addr = netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
	f := s.families[addrFamily(addr.Addr())]
	return f != nil && f.override(name, addr, o)
}

// Refresh puts a service port into the next Delta, also if nothing of it differs, because
// something that the answer of a hook depends on has changed. Options.EditEndpoints runs
// again, and so does what the receiver of the Delta has, as desired.Resolver.EditSelection.
// changed says whether there is such a service port.
func (t *Tracker) Refresh(name ServicePortName) (changed bool) {
	s := t.store
	s.mu.Lock()
	defer s.unlock()
	key := name.key()
	for _, f := range s.families {
		if f == nil {
			continue
		}
		if held := f.services[name.NamespacedName]; held != nil && held.port(key) != nil {
			f.mark(name.NamespacedName).refresh(key)
			changed = true
		}
	}
	return changed
}
