package changetracker

import (
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
