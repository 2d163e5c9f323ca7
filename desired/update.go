package desired

import (
	"iter"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Update is one step of an engine: what the data plane of one IP family must become.
type Update struct {
	Family v1.IPFamily
	// Full means that Changes is complete: the engine deletes all other objects of its instance
	// from the kernel and checks the existing ones. Otherwise it touches only what Changes
	// names.
	Full bool
	// Changes has each service port once. The order is for engines that need several steps:
	// first deleted service ports, then those that lose frontends to others, then by
	// importance. A Full Update has no deleted ones.
	Changes []Change
	// Gone are the Keys of frontends that a service port had and none has now, sorted, also if
	// Full. They depend only on service ports, not on their endpoints.
	Gone []Key
	// Was is the acknowledged state: each service port as it was programmed last, for the node
	// as it was then. Now is the wanted state. Both are set also if Full. They keep States in
	// memory: do not keep them.
	Was, Now *Resolved
	// Globals is always complete. How pods are detected (SameDetection) changes only with a
	// Full Update.
	Globals Globals
}

// Change is the change of one service port.
type Change struct {
	Name changetracker.ServicePortName
	// After is what to program; nil if the service port is deleted.
	After *Service
	// Source is the change that the trackers reported: its Added and Removed are the endpoints
	// that differ from the acknowledged ones, with zones, nodes and Ext. Nil if only frontends
	// have moved between service ports, and if Full.
	Source *changetracker.Change
}

// ChangesTo returns the Changes that program these Services, in this order.
func ChangesTo(services ...*Service) []Change {
	changes := make([]Change, len(services))
	for i, s := range services {
		changes[i] = Change{Name: s.Name, After: s}
	}
	return changes
}

// Services yields the Services that exist after the Update, in order: all of Changes except
// the deleted ones.
func (u *Update) Services() iter.Seq[*Service] {
	return func(yield func(*Service) bool) {
		for i := range u.Changes {
			if s := u.Changes[i].After; s != nil && !yield(s) {
				return
			}
		}
	}
}

// Removed yields the names of the Changes that delete a service port.
func (u *Update) Removed() iter.Seq[changetracker.ServicePortName] {
	return func(yield func(changetracker.ServicePortName) bool) {
		for i := range u.Changes {
			if c := &u.Changes[i]; c.After == nil && !yield(c.Name) {
				return
			}
		}
	}
}
