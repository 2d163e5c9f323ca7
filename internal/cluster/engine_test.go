package cluster

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier"
)

// kernel holds what is programmed on a node in one family.
type kernel struct {
	mu     sync.Mutex
	rules  map[types.NamespacedName]map[changetracker.ServicePortName]*rule
	writes int
}

func newKernel() *kernel {
	return &kernel{rules: map[types.NamespacedName]map[changetracker.ServicePortName]*rule{}}
}

func (k *kernel) get(name changetracker.ServicePortName) *rule {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.rules[name.NamespacedName][name]
}

// set programs a service port, or removes it if r is nil, and reports whether that is a
// difference.
func (k *kernel) set(name changetracker.ServicePortName, r *rule) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	ports := k.rules[name.NamespacedName]
	if ports[name].equal(r) {
		return false
	}
	k.writes++
	if r == nil {
		delete(ports, name)
		return true
	}
	if ports == nil {
		ports = map[changetracker.ServicePortName]*rule{}
		k.rules[name.NamespacedName] = ports
	}
	ports[name] = r
	return true
}

func (k *kernel) clear() {
	for _, name := range k.names() {
		k.set(name, nil)
	}
}

// written counts the writes so far.
func (k *kernel) written() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.writes
}

func (k *kernel) names() (names []changetracker.ServicePortName) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, ports := range k.rules {
		for name := range ports {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, changetracker.ServicePortName.Compare)
	return names
}

func (k *kernel) of(service types.NamespacedName) (names []changetracker.ServicePortName) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name := range k.rules[service] {
		names = append(names, name)
	}
	return names
}

// sends reports whether a client may get to an endpoint of a Service.
func (k *kernel) sends(t target) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	is := func(a addrPort) bool { return a.Addr() == t.addr }
	for _, r := range k.rules[t.service] {
		if slices.ContainsFunc(r.cluster, is) || slices.ContainsFunc(r.local, is) {
			return true
		}
	}
	return false
}

// differences compares one Service, or all for the zero name, with a view.
func (k *kernel) differences(v *view, family int, services ...types.NamespacedName) (all []string) {
	for _, service := range services {
		wanted := v.rules(service, families[family])
		names := append(v.names(service), k.of(service)...)
		slices.SortFunc(names, changetracker.ServicePortName.Compare)
		for _, name := range slices.Compact(names) {
			if have := k.get(name); !have.equal(wanted[name]) {
				all = append(all, describe(name, have, wanted[name]))
			}
		}
	}
	return all
}

// longestApply is how long an Apply takes at most, in a kernel that is not slow.
const longestApply = 30 * time.Millisecond

// failure is what goes wrong in a kernel.
type failure int

const (
	works failure = iota
	failsBefore
	failsBetween // some of the Update is programmed
	failsAfter   // all of it is
	failsSome    // a few service ports
	failures
)

var errKernel = errors.New("the kernel refuses")

// engine programs a kernel.
type engine struct {
	node   *node
	proc   *process
	family int
}

// Apply implements proxier.Engine.
func (e *engine) Apply(ctx context.Context, u desired.Update) (r proxier.Result, err error) {
	n := e.node
	n.mu.Lock()
	n.applies[e.family]++
	count, failing, slow := n.applies[e.family], n.failing, time.Now().Before(n.slow)
	n.mu.Unlock()
	random := n.sim.number("apply", n.id, e.family, count)
	took := time.Millisecond + time.Duration(random%uint64(longestApply-2*time.Millisecond))
	if slow {
		took += time.Second
	}
	cut := len(u.Changes)
	if failing == failsBetween {
		cut = int(random % uint64(cut+1))
	}
	if !pause.For(ctx, took/2) || failing == failsBefore {
		return r, errors.Join(ctx.Err(), errKernel)
	}
	r.Report.Transactions = 1
	r.Report.Writes, r.Failed = e.write(&u, cut, failing == failsSome, random)
	if !pause.For(ctx, took-took/2) || failing == failsBetween || failing == failsAfter {
		return r, errors.Join(ctx.Err(), errKernel)
	}
	return r, nil
}

// write programs the first changes of an Update. If it fails some, it leaves these as they are.
func (e *engine) write(u *desired.Update, cut int, some bool, random uint64) (writes int, failed []*proxier.ServiceError) {
	k, listed := e.node.kernel[e.family], map[changetracker.ServicePortName]bool{}
	for i, c := range u.Changes {
		listed[c.Name] = true
		switch {
		case i >= cut:
		case some && (random>>(i%32))%4 == 0 && c.After != nil:
			failed = append(failed, &proxier.ServiceError{Name: c.Name, Err: errKernel})
		case k.set(c.Name, ruleOf(c.After)):
			writes++
		}
	}
	if u.Full && cut == len(u.Changes) {
		for _, name := range k.names() {
			if !listed[name] && k.set(name, nil) {
				writes++
			}
		}
	}
	return writes, failed
}

// Cleanup implements proxier.Engine.
func (e *engine) Cleanup(context.Context) error { return nil }

// Close implements proxier.Engine.
func (e *engine) Close() error { return nil }

// Traits implements proxier.Engine.
func (e *engine) Traits(*desired.Service) desired.Traits { return desired.Traits{} }

// Abilities implements proxier.Engine.
func (e *engine) Abilities() proxier.Abilities { return proxier.Abilities{} }

// ruleOf is what a Service of an Update means.
func ruleOf(s *desired.Service) *rule {
	if s == nil {
		return nil
	}
	r := &rule{cluster: s.Cluster.Slice(), local: s.Local.Slice()}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		r.front(s.Key(f), f.Kind.String(), f.Action.String(), f.Scope.String())
	}
	r.fronts += fmt.Sprintf("affinity %v", s.Affinity != 0)
	return r
}

// checked is the boundary between driver and engine: it checks every Update and every result
// against the view of the process.
type checked struct {
	proxier.Engine

	node   *node
	proc   *process
	family int
}

// Apply implements proxier.Engine.
func (c *checked) Apply(ctx context.Context, u desired.Update) (proxier.Result, error) {
	wanted, seen := c.before(&u)
	result, err := c.Engine.Apply(ctx, u)
	c.after(&u, wanted, seen, result, err)
	return result, err
}

// seen is what an Update must take care of.
type seen struct {
	pending []change
	dirty   map[types.NamespacedName]bool
	full    bool
}

func (c *checked) before(u *desired.Update) (wanted map[changetracker.ServicePortName]*rule, s seen) {
	p, family, violate := c.proc, families[c.family], c.node.sim.violate
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.complete != [kinds]bool{true, true} {
		violate("waits for both lists", "%s %s programs %d service ports before", c.node.name, family, len(u.Changes))
	}
	wanted = map[changetracker.ServicePortName]*rule{}
	for i := range u.Changes {
		change := &u.Changes[i]
		wanted[change.Name] = p.view.rule(change.Name, family)
		if have := ruleOf(change.After); !have.equal(wanted[change.Name]) {
			violate("programs what it knows", "%s %s: %s", c.node.name, family, describe(change.Name, have, wanted[change.Name]))
		}
		if _, failed := p.failing[c.family][change.Name]; !failed && !p.again[c.family] && !p.dirty[c.family][change.Name.NamespacedName] {
			violate("works for changes only", "%s %s updates %s without a change", c.node.name, family, change.Name)
		}
	}
	if u.Full && !p.again[c.family] {
		violate("works for changes only", "%s %s makes a full sync without need", c.node.name, family)
	}
	if u.Full {
		c.addMissing(wanted, u)
	}
	s = seen{p.pending[c.family], p.dirty[c.family], u.Full}
	p.pending[c.family], p.dirty[c.family], p.again[c.family] = nil, map[types.NamespacedName]bool{}, false
	return wanted, s
}

// addMissing checks that a full Update is complete.
func (c *checked) addMissing(wanted map[changetracker.ServicePortName]*rule, u *desired.Update) {
	for service := range c.proc.view.services {
		for _, name := range c.proc.view.names(service) {
			r := c.proc.view.rule(name, families[c.family])
			if _, listed := wanted[name]; !listed && r != nil {
				c.node.sim.violate("programs what it knows", "%s %s: a full Update of %d lacks %s",
					c.node.name, families[c.family], len(u.Changes), name)
				wanted[name] = r
			}
		}
	}
	for _, name := range c.node.kernel[c.family].names() {
		if _, listed := wanted[name]; !listed {
			wanted[name] = nil
		}
	}
}

func (c *checked) after(u *desired.Update, wanted map[changetracker.ServicePortName]*rule, s seen, result proxier.Result, err error) {
	p, now := c.proc, time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	kernel := c.node.kernel[c.family]
	switch {
	case p.stopped:
		c.node.sim.note(applyCut)
	case err != nil:
		c.node.sim.note(applyFailed)
	case len(result.Failed) > 0:
		c.node.sim.note(applyPartly)
	}
	if p.broken[c.family] = err != nil; err != nil {
		p.failed[c.family], p.again[c.family] = now, true
		p.pending[c.family] = append(s.pending, p.pending[c.family]...)
		return
	}
	for name := range wanted {
		delete(p.failing[c.family], name)
	}
	for _, f := range result.Failed {
		p.failing[c.family][f.Name] = portFailure{now, wanted[f.Name]}
		delete(wanted, f.Name)
	}
	for name, want := range wanted {
		if have := kernel.get(name); !have.equal(want) {
			c.node.sim.violate("programs what it knows", "%s %s, after an Apply: %s", c.node.name, families[c.family], describe(name, have, want))
		}
	}
	if writes := result.Report.Writes; !s.full && writes > len(u.Changes) {
		c.node.sim.violate("works for changes only", "%s %s writes %d for %d changes", c.node.name, families[c.family], writes, len(u.Changes))
	}
	c.node.programmed(c.family, s, result.Report.Writes, wanted)
}

// programmed takes the success of an Apply into the statistics and the digest.
func (n *node) programmed(family int, s seen, writes int, wanted map[changetracker.ServicePortName]*rule) {
	h, now := fnv.New64a(), time.Now()
	fmt.Fprint(h, n.id, family, now.Sub(n.sim.begin), writes, len(wanted))
	n.sim.mu.Lock()
	defer n.sim.mu.Unlock()
	n.sim.digest += h.Sum64()
	n.sim.stats.applied(n.id, s, writes, now)
}
