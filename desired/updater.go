package desired

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// manyEndpoints is how many a service port must have to be resolved from its previous version.
const manyEndpoints = 128

// Updater makes Updates from the Steps of a Tracker, for one engine and IP family. Call Next
// with each Step, and then Done, unless nothing of the Update counts as programmed: the next
// Update must be full then. Proxier has one for each engine. It is for one goroutine.
type Updater struct {
	rank map[types.NamespacedName]int // of important Services, from 1
	// programmed is the wanted state of the last Update for which Done was called. kept holds
	// the service ports that failed in it.
	programmed *Resolved
	kept       kept
	// unheld are the Keys that one service port has given up for another one that failed.
	unheld map[Key]bool
	retry  []changetracker.ServicePortName
	// lost are the Keys that service ports ask for and do not get in the last Update.
	lost     map[changetracker.ServicePortName][]Key
	was, now *Resolved // of the last Update, until Done
	// long are service ports with many endpoints as they were resolved last, for the next time.
	long map[changetracker.ServicePortName]taken
}

// NewUpdater returns an Updater that has programmed nothing yet. The ports of the important
// Services come before all others.
func NewUpdater(important ...types.NamespacedName) *Updater {
	u := &Updater{rank: map[types.NamespacedName]int{}, lost: map[changetracker.ServicePortName][]Key{}, long: map[changetracker.ServicePortName]taken{}}
	for _, name := range important {
		if u.rank[name] == 0 {
			u.rank[name] = len(u.rank) + 1
		}
	}
	return u
}

// Next returns the Update for a Step, including the service ports that failed in the last one.
// It is full if full is set or the Step's Delta is. Only in a full Update may the Resolver and
// the Globals differ from the previous ones, except for Globals.ServiceCIDRs.
func (u *Updater) Next(step changetracker.Step, resolver Resolver, globals Globals, full bool) Update {
	if u.programmed == nil {
		u.programmed = NewResolved(step.Before, resolver, globals)
	}
	was := *u.programmed
	was.state, was.kept = step.Before, u.kept
	next := Update{
		Family: step.After.Family(), Full: full || step.Delta.Full, Globals: globals,
		Was: &was, Now: NewResolved(step.After, resolver, globals),
	}
	c := changed{Updater: u, Update: &next, seen: make(map[changetracker.ServicePortName]bool, len(step.Delta.Changes)+len(u.retry))}
	c.collect(&step.Delta)
	next.Gone = c.gone()
	if next.Full {
		next.Changes = u.everything(next.Now)
	} else {
		c.resolve()
		next.Changes = c.changes
	}
	slices.SortFunc(next.Changes, func(a, b Change) int {
		return cmp.Or(cmp.Compare(c.group(&a), c.group(&b)), a.Name.Compare(b.Name))
	})
	u.was, u.now = next.Was, next.Now
	return next
}

// everything resolves all service ports.
func (u *Updater) everything(now *Resolved) []Change {
	clear(u.lost)
	clear(u.long)
	changes := make([]Change, 0, now.state.Len())
	for s := range now.All() {
		changes = append(changes, Change{Name: s.Name, After: s})
		u.note(s)
	}
	return changes
}

func (u *Updater) note(s *Service) {
	if len(s.Lost) > 0 {
		u.lost[s.Name] = s.Lost
	} else {
		delete(u.lost, s.Name)
	}
}

// Retry adds these service ports to the next Update, because their objects in the kernel are
// damaged.
func (u *Updater) Retry(names ...changetracker.ServicePortName) { u.retry = append(u.retry, names...) }

// Done acknowledges the last Update, except for the service ports that failed, which keep
// their previous state. It returns them without duplicates, sorted, as Tracker.Apply needs
// them.
func (u *Updater) Done(failed []changetracker.ServicePortName) []changetracker.ServicePortName {
	was, now, unheld := u.was, u.now, u.unheld
	if now == nil {
		return nil
	}
	failed = slices.Clone(failed)
	slices.SortFunc(failed, changetracker.ServicePortName.Compare)
	failed = slices.Compact(failed)
	u.programmed, u.retry, u.kept, u.unheld, u.was, u.now = now, failed, kept{}, nil, nil, nil
	if len(failed) == 0 {
		return nil
	}
	u.kept = kept{make(map[changetracker.ServicePortName]*Service, len(failed)), map[Key]changetracker.ServicePortName{}}
	u.unheld = map[Key]bool{}
	for _, name := range failed {
		u.kept.services[name], _ = was.Service(name)
	}
	for _, name := range failed {
		if s := u.kept.services[name]; s != nil {
			s = s.without(u.taken(s, now))
			u.kept.services[name] = s
			for i := range s.Frontends {
				u.kept.holders[s.Key(&s.Frontends[i])] = name
			}
		}
		for _, key := range now.resolver.keys(now.port(name)) {
			if now.has(key) && (was.has(key) || unheld[key]) {
				u.unheld[key] = true
			}
		}
	}
	return failed
}

// taken returns the Keys of a failed service port that others have got.
func (u *Updater) taken(s *Service, now *Resolved) (taken []Key) {
	for i := range s.Frontends {
		key := s.Key(&s.Frontends[i])
		holder, ok := now.holder(key)
		if _, failed := u.kept.services[holder]; ok && !failed {
			taken = append(taken, key)
		}
	}
	return taken
}

// changed is an Update that is not complete yet.
type changed struct {
	*Updater
	*Update

	changes []Change
	seen    map[changetracker.ServicePortName]bool
	// claims are the service ports whose frontends may change: those that differ, and those
	// that win or lose a frontend because of them.
	claims []changetracker.ServicePortName
	moved  map[changetracker.ServicePortName]bool // the same names; true: gives up a frontend
}

// group sorts deleted service ports first and then those that give up a frontend, so that Keys
// are free before others get them if the engine takes several steps.
func (c *changed) group(change *Change) int {
	switch {
	case change.After == nil:
		return -2
	case c.moved[change.Name]:
		return -1
	}
	if rank := c.rank[change.Name.NamespacedName]; rank != 0 {
		return rank
	}
	return len(c.rank) + 1
}

// collect finds the service ports of the delta, those that failed, and those that win or lose
// a frontend because of either. One that failed may be back to its previous state and not in
// the delta: its claims have changed nevertheless.
func (c *changed) collect(delta *changetracker.Delta) {
	if c.Full && c.programmed.state.Len()+len(c.retry) == 0 { // at start: nothing is programmed
		return
	}
	c.changes = make([]Change, 0, len(delta.Changes)+len(c.retry))
	for i := range delta.Changes {
		if d := &delta.Changes[i]; d.Before != nil || d.After != nil {
			c.seen[d.Name] = true
			c.changes = append(c.changes, Change{Name: d.Name, Source: d})
		}
	}
	for _, name := range c.retry {
		c.add(name)
	}
	for i := range c.changes {
		name := c.changes[i].Name
		if before, now := c.programmed.port(name), c.Now.port(name); before != now {
			c.move(name)
			for _, other := range c.Now.moved(c.programmed, before, now) {
				c.move(other)
			}
		}
	}
	for _, name := range c.retry {
		c.move(name)
	}
}

func (c *changed) add(name changetracker.ServicePortName) {
	if !c.seen[name] {
		c.seen[name] = true
		c.changes = append(c.changes, Change{Name: name})
	}
}

// move records a service port whose frontends may change.
func (c *changed) move(name changetracker.ServicePortName) {
	if _, known := c.moved[name]; known || name.Name == "" {
		return
	}
	if c.moved == nil {
		c.moved = map[changetracker.ServicePortName]bool{}
	}
	c.moved[name] = false
	c.claims = append(c.claims, name)
}

// resolve resolves the service ports.
func (c *changed) resolve() {
	for _, name := range c.claims {
		c.add(name)
	}
	for i := range c.changes {
		change := &c.changes[i]
		t, ok := c.Now.resolver.resolve(c.Now.state, change.Name, c.long[change.Name])
		if all, _, _ := t.choice.Len(); all >= manyEndpoints {
			c.long[change.Name] = t
		} else {
			delete(c.long, change.Name)
		}
		if !ok {
			delete(c.lost, change.Name)
			continue
		}
		s := t.service
		if _, moved := c.moved[s.Name]; moved {
			s = s.without(c.Now.lost(s.Name, s.Port))
			c.note(s)
			c.moved[s.Name] = slices.ContainsFunc(c.Was.keysOf(s.Name), func(key Key) bool { return s.find(key) == nil })
		} else {
			s = s.without(c.lost[s.Name])
		}
		change.After = s
	}
}

// gone returns the Keys that a service port had and none has now.
func (c *changed) gone() (gone []Key) {
	names := c.claims
	if c.Full && !c.programmed.sameClaims(c.Now) {
		names = slices.Clone(names)
		for name := range c.programmed.state.All() {
			names = append(names, name)
		}
	}
	for _, name := range names {
		for _, key := range c.Was.keysOf(name) {
			if !c.Now.has(key) {
				gone = append(gone, key)
			}
		}
	}
	for key := range c.unheld {
		if !c.Now.has(key) {
			gone = append(gone, key)
		}
	}
	slices.SortFunc(gone, Key.Compare)
	return slices.Compact(gone)
}

// keysOf returns the Keys of the frontends that a service port has.
func (r *Resolved) keysOf(name changetracker.ServicePortName) (keys []Key) {
	if s, kept := r.kept.services[name]; kept {
		if s != nil {
			for i := range s.Frontends {
				keys = append(keys, s.Key(&s.Frontends[i]))
			}
		}
		return keys
	}
	return slices.DeleteFunc(r.resolver.keys(r.port(name)), func(key Key) bool {
		winner, ok := r.winner(key)
		return !ok || winner.Name != name
	})
}
