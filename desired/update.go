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
	// importance. A deleted one may be unknown to the engine, if it never could be programmed.
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
	// Before is what the engine has, and After what to program; nil: nothing.
	Before, After *Service
	// Source is the change that the trackers reported: its Added and Removed are the endpoints
	// that differ from those that the engine has, with zones, nodes and Ext. After a failure
	// they are all that there are and were. Nil if only frontends have moved between service
	// ports, and if Full.
	Source *changetracker.PortChange
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

// Applied is what an Update has made of a service port.
type Applied struct {
	Name changetracker.ServicePortName
	// Was is what the engine had before, and Is what it has now; nil: nothing.
	Was, Is *Service
	// Failed says that Is is not what the Update wants.
	Failed bool
}

// Applied returns what an engine has made of an Update, if it failed to program some service
// ports. It lists every service port of Changes in their order, and then the others that failed,
// each once. One that failed is as it was, but for the frontends that others have got.
func (u *Update) Applied(failed []changetracker.ServicePortName) []Applied {
	bad := make(map[changetracker.ServicePortName]bool, len(failed))
	for _, name := range failed {
		bad[name] = true
	}
	outcomes := make([]Applied, 0, len(u.Changes))
	got := map[Key]bool{} // by service ports that did not fail
	for i := range u.Changes {
		c := &u.Changes[i]
		o := Applied{Name: c.Name, Was: c.Before, Is: c.After, Failed: bad[c.Name]}
		outcomes = append(outcomes, o)
		if len(failed) > 0 && !o.Failed {
			for key := range o.Is.keys() {
				got[key] = true
			}
		}
		delete(bad, c.Name)
	}
	for _, name := range failed {
		if bad[name] {
			was, _ := u.Was.Service(name)
			outcomes = append(outcomes, Applied{Name: name, Was: was, Failed: true})
			delete(bad, name)
		}
	}
	for i := range outcomes {
		if o := &outcomes[i]; o.Failed {
			o.Is = o.Was.withoutAny(got)
		}
	}
	return outcomes
}
