package desired

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// manyEndpoints is how many a service port must have to be resolved from its previous version.
const manyEndpoints = 64

// Updater makes Updates from the Deltas of a Tracker, for one engine and IP family. Call Next
// with each Delta, and then Done, unless nothing of the Update counts as programmed: the next
// Update must be full then. Proxier has one for each engine. It is for one goroutine.
//
// A service port that failed stays as the engine has it until an Update has it once more: because it
// changes, because Retry asks for it, because another one gets a Key that it holds, or because the
// Update is full. So the function that Tracker.Apply calls returns no failed service ports.
type Updater struct {
	rank map[types.NamespacedName]int // of important Services, from 1
	// programmed is the wanted state of the last Update for which Done was called. kept holds
	// the service ports that differ from it, because they failed.
	programmed *Resolved
	kept       kept
	// unowned are the Keys that one service port has given up for another one that failed.
	unowned map[Key]bool
	retry   []changetracker.ServicePortName // in the next Update
	// lost are the Keys that service ports ask for and do not get in the last Update.
	lost map[changetracker.ServicePortName][]Key
	last Update // until Done
	// known are service ports as they are programmed: those with many endpoints, because resolving them
	// again costs much, and all if there is an EditSelection, because it may decide otherwise now. next
	// are those of the last Update.
	known map[changetracker.ServicePortName]selected
	next  []selected
}

// NewUpdater returns an Updater that has programmed nothing yet. The ports of the important
// Services come before all others.
func NewUpdater(important ...types.NamespacedName) *Updater {
	u := &Updater{
		rank: map[types.NamespacedName]int{}, lost: map[changetracker.ServicePortName][]Key{}, known: map[changetracker.ServicePortName]selected{},
		kept: kept{map[changetracker.ServicePortName]keptPort{}, map[Key]changetracker.ServicePortName{}}, unowned: map[Key]bool{},
	}
	for _, name := range important {
		if u.rank[name] == 0 {
			u.rank[name] = len(u.rank) + 1
		}
	}
	return u
}

// Next returns the Update for a Delta, with the service ports that Retry named. It is full if full
// is set or the Delta is. Only in a full Update may the Resolver and the Globals differ
// from the previous ones, except for Globals.ServiceCIDRs and the labels of the Node.
func (u *Updater) Next(delta changetracker.Delta, resolver Resolver, globals Globals, full bool) Update {
	if u.programmed == nil {
		u.programmed = NewResolved(delta.Before, resolver, globals)
	}
	was := *u.programmed
	was.state, was.kept, was.known, u.next = delta.Before, u.kept, u.known, nil
	next := Update{
		Family: delta.After.Family(), Full: full || delta.Full, Globals: globals,
		Was: &was, Now: NewResolved(delta.After, resolver, globals),
	}
	c := changed{Updater: u, Update: &next, seen: make(map[changetracker.ServicePortName]bool, len(delta.Changes)+len(u.retry))}
	c.collect(&delta)
	next.Gone = c.gone()
	if next.Full {
		next.Changes = c.everything()
	} else {
		c.resolve()
		next.Changes = c.changes
	}
	slices.SortFunc(next.Changes, func(a, b Change) int {
		return cmp.Or(cmp.Compare(c.group(&a), c.group(&b)), a.Name.Compare(b.Name))
	})
	u.last = next
	return next
}

// everything resolves all service ports that there were or are.
func (c *changed) everything() []Change {
	clear(c.lost)
	var before map[changetracker.ServicePortName]*Service
	var resolving sync.WaitGroup
	resolving.Go(func() { before = c.everythingBefore() })
	services := slices.AppendSeq(make([]*Service, 0, c.Now.state.Len()), c.Now.All())
	resolving.Wait()
	changes := make([]Change, 0, len(services))
	for _, s := range services {
		was, differs := before[s.Name]
		if !differs && c.programmed.port(s.Name) != nil {
			was = s
		}
		delete(before, s.Name)
		changes = append(changes, Change{Name: s.Name, Before: was, After: s})
		c.note(s)
		if c.Now.resolver.EditSelection != nil {
			c.next = append(c.next, selected{service: s})
		}
	}
	for name, was := range before {
		changes = append(changes, Change{Name: name, Before: was})
	}
	return changes
}

// everythingBefore returns what the engine has of each service port that may differ now; nil if it has
// nothing.
func (c *changed) everythingBefore() map[changetracker.ServicePortName]*Service {
	var names []types.NamespacedName
	all, size := false, 0
	if c.programmed.state.Len() > 0 {
		names, all = c.Now.Changed(c.programmed)
	}
	if all {
		size = c.programmed.state.Len()
	}
	before := make(map[changetracker.ServicePortName]*Service, size)
	for name, port := range c.kept.services {
		before[name] = port.service
	}
	if all {
		for s := range c.Was.All() {
			before[s.Name] = s
		}
	}
	for _, service := range names {
		for _, name := range c.Was.state.ServicePorts(service) {
			before[name], _ = c.Was.Service(name)
		}
	}
	return before
}

func (u *Updater) note(s *Service) {
	if len(s.Lost) > 0 {
		u.lost[s.Name] = s.Lost
	} else {
		delete(u.lost, s.Name)
	}
}

// Retry adds these service ports to the next Update: they failed, or their objects in the kernel are
// damaged.
func (u *Updater) Retry(names ...changetracker.ServicePortName) { u.retry = append(u.retry, names...) }

// Done acknowledges the last Update, except for the service ports that failed, which stay as the
// engine has them. It returns what became of each service port of the Update; see Outcomes.
func (u *Updater) Done(failed []changetracker.ServicePortName) []Applied {
	if u.last.Now == nil {
		return nil
	}
	outcomes := u.last.Applied(failed)
	was, now := *u.last.Was, u.last.Now
	for _, key := range u.last.Gone {
		delete(u.unowned, key)
	}
	if u.last.Full {
		clear(u.known)
	}
	for i := range outcomes {
		u.keep(&outcomes[i], &was)
		delete(u.known, outcomes[i].Name)
	}
	for _, t := range u.next {
		u.known[t.service.Name] = t
	}
	if len(u.kept.services) > 0 {
		for i := range outcomes {
			u.giveUp(outcomes[i].Was, now)
		}
	}
	u.programmed, u.retry, u.last = now, nil, Update{}
	return outcomes
}

// giveUp finds the Keys that a service port has given up for one that failed.
func (u *Updater) giveUp(was *Service, now *Resolved) {
	for key := range was.keys() {
		holder, wanted := now.holder(key)
		_, failed := u.kept.services[holder]
		if _, held := u.kept.holders[key]; wanted && failed && !held {
			u.unowned[key] = true
		}
	}
}

// keep takes over what the engine has of a service port. Its endpoints are those of had if it has not
// failed before.
func (u *Updater) keep(o *Applied, had *Resolved) {
	old, failedBefore := u.kept.services[o.Name]
	if failedBefore {
		u.release(o.Name, old.service)
	}
	if !o.Failed {
		if len(u.unowned) > 0 {
			for key := range o.Is.keys() {
				delete(u.unowned, key)
			}
		}
		return
	}
	port := keptPort{o.Is, old.endpoints}
	if !failedBefore && o.Is != nil {
		port.endpoints = had.state.Endpoints(o.Name)
	}
	u.kept.services[o.Name] = port
	for key := range o.Is.keys() {
		u.kept.holders[key] = o.Name
	}
}

// release forgets a service port that failed.
func (u *Updater) release(name changetracker.ServicePortName, has *Service) {
	delete(u.kept.services, name)
	for key := range has.keys() {
		if u.kept.holders[key] == name {
			delete(u.kept.holders, key)
		}
	}
}

// changed is an Update that is not complete yet.
type changed struct {
	*Updater
	*Update

	changes []Change
	seen    map[changetracker.ServicePortName]bool
	// claims are the service ports with frontends that may change: they differ, or win or lose a
	// frontend because of another one that differs.
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

// collect finds the service ports of the delta, those to retry, and those that win or lose a
// frontend because of either, or that hold a Key of one.
func (c *changed) collect(delta *changetracker.Delta) {
	if c.Full {
		c.retry = slices.AppendSeq(c.retry, maps.Keys(c.kept.services))
	}
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
	if len(c.kept.holders) > 0 {
		c.collectHolders()
	}
}

// collectHolders adds the service ports that failed and hold a Key of others.
func (c *changed) collectHolders() {
	for i := range c.changes {
		c.move(c.changes[i].Name)
	}
	for unseen := c.claims; len(unseen) > 0; { // holders have claims of their own
		known := len(c.claims)
		for _, name := range unseen {
			for _, key := range c.Now.resolver.keys(c.Now.port(name)) {
				if holder, ok := c.kept.holders[key]; ok {
					c.add(holder)
					c.move(holder)
				}
			}
		}
		unseen = c.claims[known:]
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
		change.Before = c.before(change.Name)
		var t selected
		port, ok := c.Now.state.Service(change.Name)
		if ok {
			t, ok = c.Now.resolver.resolve(c.Now.state, port, c.known[change.Name])
		}
		if all, _, _ := t.choice.Len(); ok && (all >= manyEndpoints || c.Now.resolver.EditSelection != nil) {
			c.next = append(c.next, t)
		}
		if ok {
			change.After = c.ownFrontends(t.service)
		} else {
			delete(c.lost, change.Name)
		}
		if kept, ok := c.kept.services[change.Name]; ok {
			change.Source = kept.sourceOf(change, c.Now.state)
		}
	}
}

// before returns what the engine has of a service port, nil if it has nothing.
func (c *changed) before(name changetracker.ServicePortName) *Service {
	if port, kept := c.kept.services[name]; kept {
		return port.service
	}
	if s, ok := c.Was.asks(name); ok {
		return s.without(c.lost[name])
	}
	return nil
}

// ownFrontends returns a service port without the frontends that others get.
func (c *changed) ownFrontends(s *Service) *Service {
	if _, moved := c.moved[s.Name]; !moved {
		return s.without(c.lost[s.Name])
	}
	s = s.without(c.Now.lost(s.Name, s.Port))
	c.note(s)
	_, failed := c.kept.services[s.Name] // the engine may have any of its frontends
	c.moved[s.Name] = failed || slices.ContainsFunc(c.Was.keysOf(s.Name), func(key Key) bool { return s.find(key) == nil })
	return s
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
	for key := range c.unowned {
		if !c.Now.has(key) {
			gone = append(gone, key)
		}
	}
	slices.SortFunc(gone, Key.Compare)
	return slices.Compact(gone)
}

// keysOf returns the Keys of the frontends that a service port has.
func (r *Resolved) keysOf(name changetracker.ServicePortName) (keys []Key) {
	if port, kept := r.kept.services[name]; kept {
		return slices.Collect(port.service.keys())
	}
	return slices.DeleteFunc(r.resolver.keys(r.port(name)), func(key Key) bool {
		winner, ok := r.winner(key)
		return !ok || winner.Name != name
	})
}
