package desired

import (
	"iter"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Update is one step of an engine: what one IP family's data plane must become.
type Update struct {
	Family v1.IPFamily
	// Full says that Changes is everything: whatever else the engine's instance
	// owns in the kernel goes away, and what is there is checked. Otherwise only
	// what Changes names is touched.
	Full bool
	// Changes has each service port once, in the order for engines that need several
	// steps: first what is gone, then what loses frontends to others, then by importance.
	// When Full, none is gone.
	Changes []Change
	// Gone are the Keys of frontends that some service port has had, and none has now,
	// sorted. They depend on service ports alone, not on their endpoints. Also when Full.
	Gone []Key
	// Was is what is acknowledged: each service port as it was programmed last, for the
	// node as it was then. Now is what is wanted. Both are there when Full, too, and hold on
	// to States: keep neither.
	Was, Now *Resolved
	// Globals is always complete. How pods are told apart (SameDetection) changes
	// only with a Full update.
	Globals Globals
}

// Change is what one service port becomes.
type Change struct {
	Name changetracker.ServicePortName
	// After is what to program; nil when the service port is gone.
	After *Service
	// Source is what the trackers say has changed: its Added and Removed are the endpoints
	// that differ from what is acknowledged, with zones, nodes and Ext. Nil when only
	// frontends have moved between service ports, and when Full.
	Source *changetracker.Change
}

// ChangesTo are the Changes that make service ports what these are, in this order.
func ChangesTo(services ...*Service) []Change {
	changes := make([]Change, len(services))
	for i, s := range services {
		changes[i] = Change{Name: s.Name, After: s}
	}
	return changes
}

// Services yields what is to be there after the Update, in order: all of Changes but
// what is gone.
func (u *Update) Services() iter.Seq[*Service] {
	return func(yield func(*Service) bool) {
		for i := range u.Changes {
			if s := u.Changes[i].After; s != nil && !yield(s) {
				return
			}
		}
	}
}

// Removed yields the names of the Changes that are gone.
func (u *Update) Removed() iter.Seq[changetracker.ServicePortName] {
	return func(yield func(changetracker.ServicePortName) bool) {
		for i := range u.Changes {
			if c := &u.Changes[i]; c.After == nil && !yield(c.Name) {
				return
			}
		}
	}
}
