package changetracker

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Tracker turns Services and EndpointSlices into States and Deltas. Its input are the methods
// of Services and Endpoints, which may be called at any time, also while an Apply runs.
type Tracker struct {
	Services  *ServiceChangeTracker
	Endpoints *EndpointChangeTracker
	store     *store
	lent      bool
}

// ErrLent is returned by Apply of a Tracker that Lend has returned.
var ErrLent = errors.New("only the owner of the tracker applies its changes")

// Lend returns the same tracker for others than the owner, who applies its changes: they add objects and
// look things up. Apply returns ErrLent there, also that of Services, Endpoints and Sources.
func (t *Tracker) Lend() *Tracker {
	own := t.store
	return &Tracker{Services: &ServiceChangeTracker{store: own, lent: true}, Endpoints: &EndpointChangeTracker{store: own, lent: true}, store: own, lent: true}
}

// New returns an empty tracker. The error names every invalid option and wraps
// ErrInvalidOptions.
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

// Apply calls fn with the newest State of a family and the Delta to it from the State that has
// been applied, and returns the error of fn. It costs what changed, not what is tracked.
//
// If fn returns an error nothing is consumed: the next Delta starts from the same State, so no
// change is lost. Otherwise the Delta is consumed, except for the service ports in failed:
// they stay pending with their previous values. Names that are not in the Delta are ignored.
// Deltas are Full until fn succeeds once, fully or partly. Changes that cancel out are not in
// the Delta; fn is called even if the Delta is empty.
//
// Events may arrive while fn runs; they wait for the next Apply. Calls for one family wait for
// each other, so fn must not call Apply for the same family. The error for a family that is
// not tracked is ErrUnknownFamily.
func (t *Tracker) Apply(family v1.IPFamily, fn func(Delta) (failed []ServicePortName, err error)) error {
	return t.store.applyFor(t.lent, family, Part{}, fn)
}

// ApplyPart is Apply for a part of the changes, as if the events of other Services came later: Changed
// receives another value, and the Delta has More. Namespaces have equal shares, so what a namespace with few
// changes needs does not depend on how many another one has. Older changes come first, and the oldest of
// all is always there. The Services that pass frontends to each other stay together, so that these are
// never without an owner; then the Delta may have more than Part.Size. If it is Full it has everything.
// It costs what is in the Delta, not what is left.
func (t *Tracker) ApplyPart(family v1.IPFamily, part Part, fn func(Delta) (failed []ServicePortName, err error)) error {
	return t.store.applyFor(t.lent, family, part, fn)
}

// SetNode replaces the node. Values that Options.Validate refuses are ignored. If the node
// differs, the next Delta of each family is Full.
func (t *Tracker) SetNode(node Node) (changed bool) { return t.store.setNode(node) }

// PendingSince returns when the oldest change arrived that no Apply has consumed, or the zero
// time if there is none. A change that a later one cancels out counts until the next Apply. It
// is cheap. It returns the zero time for a family that is not tracked.
func (t *Tracker) PendingSince(family v1.IPFamily) time.Time { return t.store.waiting(family) }

// Problems returns the values that are set aside now, sorted by object and field.
func (t *Tracker) Problems() []Problem { return t.store.allProblems() }

// ProblemCounts counts the Problems by reason, without listing them.
func (t *Tracker) ProblemCounts() map[Reason]int { return t.store.problemCounts() }

// Counts returns the counters. It costs what is pending.
func (t *Tracker) Counts() EventCounts { return t.store.counts() }

// Synced reports that an Input is known: the Tracker has received every existing Service, or
// every EndpointSlice. SetNode reports it for the node. A sync before that would remove what a
// previous proxy has programmed.
func (t *Tracker) Synced(input Input) {
	t.store.mu.Lock()
	defer t.store.unlock()
	t.store.gate.known(input)
}

// Waiting returns the Inputs that are not known yet, sorted.
func (t *Tracker) Waiting() []Input {
	t.store.mu.Lock()
	defer t.store.mu.Unlock()
	return slices.Clone(t.store.gate.waiting)
}

// Ready is closed when all Inputs are known. Apply does not wait for it.
func (t *Tracker) Ready() <-chan struct{} { return t.store.gate.open }

// Changed receives a value when there is a change that no Apply has included yet. One value
// may stand for several changes: call Apply for each family after receiving it. It is for
// programs with one goroutine that syncs. A program whose Apply fails must retry it itself.
// The channel is never closed.
func (t *Tracker) Changed() <-chan struct{} { return t.store.changed }

// Override replaces the previous Override of an endpoint with the same By; one that is zero but for By
// removes it. Without any, the endpoint is as slices say. An Override stays while slices or Endpoints.Set have the endpoint,
// also if they change it or if another slice has it. It ends at the first Apply, successful or
// not, at which the service port does not have the endpoint. So it may arrive before the
// endpoint, unless an Apply runs in between.
//
// It is a change of that service port only. changed reports whether an Apply may see a
// difference. While a service port has overrides, other calls may report changed for a
// difference that an override hides.
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

// Refresh puts a service port into the next Delta even if it does not differ, because
// something that the result of a hook depends on has changed. Options.EditEndpoints runs
// again, and so do the hooks of the receiver, such as desired.Resolver.EditSelection. changed
// reports whether there is such a service port.
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
