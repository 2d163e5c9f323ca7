package endpointhealth

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// portKey identifies a service port in one IP family.
type portKey struct {
	family v1.IPFamily
	name   changetracker.ServicePortName
}

// serviceKey identifies a Service in one IP family.
type serviceKey struct {
	family v1.IPFamily
	name   types.NamespacedName
}

func (k portKey) service() serviceKey { return serviceKey{k.family, k.name.NamespacedName} }

// servicePort is a service port of the State. It is kept without members if it is not checked,
// so that Choose is called once.
type servicePort struct {
	portKey
	port      *changetracker.ServicePort
	endpoints []changetracker.Endpoint // that members were made of
	checked   bool
	refused   bool // its CheckPolicy
	policy    CheckPolicy
	members   []*member     // sorted by address
	elsewhere map[uint8]int // how many ready endpoints of a group are no members
	timer     timer         // for the next step of a slow start
	read      uint64        // the walk that saw it last
}

// member is an endpoint that the node may use for a service port.
type member struct {
	addr   netip.AddrPort
	target *target
	// cluster and local are the lists of its group that have it, and that frontends use.
	cluster, local bool
	ready          bool
	group          uint8
	// wanted is the Override that it should have, set the one that it has.
	wanted, set changetracker.Override
	returned    time.Time // when its slow start began
}

// read takes over the States of both families, if they are others than before.
func (c *run) read(now time.Time) {
	for i, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		state := c.source.Programmed(family)
		if state == nil || state == c.states[i] {
			continue
		}
		c.states[i] = state
		c.walk(family, state, now)
	}
}

// walk compares each service port of a State with what it was. It costs one look-up for each
// service port, and more only for those that have changed.
func (c *run) walk(family v1.IPFamily, state *changetracker.State, now time.Time) {
	c.walks++
	for name, port := range state.All() {
		key := portKey{family, name}
		s := c.ports[key]
		if s == nil {
			s = &servicePort{portKey: key}
			c.ports[key] = s
		}
		s.read = c.walks
		if s.port != port {
			s.port = port
			c.choose(s)
		}
		if !s.checked {
			continue
		}
		if list := state.Endpoints(name); !same(list, s.endpoints) {
			s.endpoints = list
			c.setMembers(s, list, state.Node(), now)
		}
	}
	for key, s := range c.ports {
		if key.family == family && s.read != c.walks {
			c.drop(s)
			delete(c.ports, key)
		}
	}
}

// same reports whether two lists are one in memory: a State never changes a list.
func same(a, b []changetracker.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// choose asks for the CheckPolicy of a service port. If it has another one than before, its
// endpoints begin anew.
func (c *run) choose(s *servicePort) {
	policy, ok, err := c.policyOf(s)
	if s.refused = err != nil; s.refused {
		c.log.Warn("health check of a Service is invalid: its endpoints are not checked", zap.Stringer("service", s.name), zap.Error(err))
	}
	if ok == s.checked && policy == s.policy {
		s.endpoints = nil // traffic policies may differ
		return
	}
	c.drop(s)
	s.checked, s.policy = ok, policy
	s.timer.fire = func(time.Time) { c.dirty[s] = struct{}{} }
}

func (c *run) policyOf(s *servicePort) (policy CheckPolicy, ok bool, err error) {
	defer func() {
		if r := recover(); r != nil {
			policy, ok, err = CheckPolicy{}, false, fmt.Errorf("hook Choose panicked: %v", r)
		}
	}()
	if policy, ok, err = c.options.Choose(s.port); err != nil || !ok {
		return CheckPolicy{}, false, err
	}
	policy = policy.WithDefaults()
	if err := errors.Join(policy.Validate(), policy.fits(s.name.Protocol)); err != nil {
		return CheckPolicy{}, false, err
	}
	return policy, true, nil
}

// setMembers takes over the endpoints of a service port.
func (c *run) setMembers(s *servicePort, list []changetracker.Endpoint, node changetracker.Node, now time.Time) {
	groups := map[uint8][]changetracker.Endpoint{}
	for _, e := range list {
		if e.Ejected { // as it would be otherwise
			e.Ready, e.Serving = !e.Terminating, true
		}
		groups[e.Priority] = append(groups[e.Priority], e)
	}
	before := s.members
	s.members, s.elsewhere = make([]*member, 0, len(list)), map[uint8]int{}
	for group, list := range groups { // also those that stand by
		selected := changetracker.Select(s.port, list, node)
		for i := range list {
			s.elsewhere[group] += count(list[i].Ready && !has(selected.All, list[i].Addr))
		}
		for i := range selected.All {
			e := &selected.All[i]
			m := find(before, e.Addr)
			if m == nil {
				m = &member{addr: e.Addr, target: c.use(s, e.Addr, now)}
			}
			m.follow(s.port, e, &selected)
			if m.set != (changetracker.Override{}) { // it ended if the endpoint was away meanwhile
				c.override(s, m, m.set)
			}
			s.members = append(s.members, m)
		}
	}
	slices.SortFunc(s.members, func(a, b *member) int { return a.addr.Compare(b.addr) })
	for _, m := range before {
		if find(s.members, m.addr) == nil {
			c.release(s, m)
		}
	}
	c.dirty[s] = struct{}{}
}

// follow takes over what is known of the endpoint.
func (m *member) follow(p *changetracker.ServicePort, e *changetracker.Endpoint, selected *changetracker.Selection) {
	m.cluster = p.UsesClusterEndpoints() && has(selected.Cluster, e.Addr)
	m.local = p.UsesLocalEndpoints() && has(selected.Local, e.Addr)
	m.group, m.ready = e.Priority, e.Ready
}

func find(members []*member, addr netip.AddrPort) *member {
	i, ok := slices.BinarySearchFunc(members, addr, func(m *member, addr netip.AddrPort) int { return m.addr.Compare(addr) })
	if !ok {
		return nil
	}
	return members[i]
}

func has(list []changetracker.Endpoint, addr netip.AddrPort) bool {
	_, ok := slices.BinarySearchFunc(list, addr, func(e changetracker.Endpoint, addr netip.AddrPort) int { return e.Addr.Compare(addr) })
	return ok
}

// use returns the target of an endpoint, which other service ports may share.
func (c *run) use(s *servicePort, addr netip.AddrPort, now time.Time) *target {
	key := targetKey{place{addr, s.name.Protocol}, s.policy.check()}
	t := c.targets[key]
	if t == nil {
		t = &target{targetKey: key, users: map[*servicePort]struct{}{}}
		t.timer.fire = func(now time.Time) { c.fire(t, now) }
		c.targets[key] = t
		c.places[key.place] = append(c.places[key.place], t)
	}
	c.members[s.service()]++
	isNew := len(t.users) == 0
	if t.users[s] = struct{}{}; isNew && key.policy.Probe != nil {
		t.timer.slack = time.Duration(float64(key.policy.Interval) * min(slackShare, key.policy.Jitter))
		c.timers.set(&t.timer, t.first(now, c.interval(t)))
	}
	return t
}

// release ends the check of an endpoint for a service port, and its Override.
func (c *run) release(s *servicePort, m *member) {
	if m.set != (changetracker.Override{}) {
		c.override(s, m, changetracker.Override{})
	}
	if of := s.service(); c.members[of] > 1 {
		c.members[of]--
	} else {
		delete(c.members, of)
	}
	t := m.target
	delete(t.users, s)
	if len(t.users) > 0 {
		return
	}
	c.timers.stop(&t.timer)
	delete(c.targets, t.targetKey)
	rest := slices.DeleteFunc(c.places[t.place], func(o *target) bool { return o == t })
	if c.places[t.place] = rest; len(rest) == 0 {
		delete(c.places, t.place)
		c.passive.forget(t.place)
	}
}

// drop ends the checks of a service port.
func (c *run) drop(s *servicePort) {
	for _, m := range s.members {
		c.release(s, m)
	}
	s.members, s.endpoints = nil, nil
	c.timers.stop(&s.timer)
	delete(c.dirty, s)
}

// targetKey identifies a check.
type targetKey struct {
	place
	policy CheckPolicy // its check()
}

// place is where an endpoint listens.
type place struct {
	addr     netip.AddrPort
	protocol v1.Protocol
}

// target is an endpoint that is checked, for one or more service ports.
type target struct {
	targetKey
	users map[*servicePort]struct{}
	timer timer

	doubt               string // of connections, for the next check to confirm
	failures, successes int    // in a row
	failing             bool
	reason              string
	since               time.Time // of failing
	// level counts the ejections that are not forgotten, and hold is how long this one lasts.
	level  int
	hold   time.Duration
	passed time.Time // when failing ended last
}

// slackShare is the part of an interval by which a check may be late, within the jitter: so one
// awakening starts several checks, which costs half of the CPU time of as many awakenings.
const slackShare = 0.02

// user returns one of its service ports.
func (t *target) user() *servicePort {
	for s := range t.users {
		return s
	}
	return &servicePort{} // nobody needs it any more
}

// next returns the time of the next check.
func (t *target) next(started time.Time, interval time.Duration) time.Time {
	spread := 2*t.policy.Jitter - float64(t.timer.slack)/float64(t.policy.Interval)
	varied := 1 - t.policy.Jitter + spread*rand.Float64() //nolint:gosec // no secret
	return started.Add(time.Duration(float64(interval) * varied))
}

// first returns the time of the first check.
func (t *target) first(now time.Time, interval time.Duration) time.Time {
	return now.Add(time.Duration(rand.Float64() * float64(interval-t.timer.slack))) //nolint:gosec // no secret
}

// result takes over the result of a check, and reports whether failing has changed.
func (t *target) result(err error, now time.Time) (changed bool) {
	if err != nil {
		t.failures, t.successes = t.failures+1, 0
		if t.failing {
			t.reason = err.Error()
			return false
		}
		return t.failures >= t.policy.Failures && t.fail(err.Error(), now)
	}
	t.failures, t.successes = 0, t.successes+1
	return t.failing && t.successes >= t.policy.Successes && t.rest(now) <= 0 && t.pass(now)
}

// fail begins a failure.
func (t *target) fail(reason string, now time.Time) bool {
	if !t.passed.IsZero() {
		t.level = max(0, t.level-int(now.Sub(t.passed)/t.policy.MaxEjectFor))
	}
	t.level++
	t.hold = t.policy.hold(t.level)
	t.failing, t.reason, t.since, t.successes = true, reason, now, 0
	return true
}

// rest is how long the ejection must last yet.
func (t *target) rest(now time.Time) time.Duration { return t.since.Add(t.hold).Sub(now) }

// pass ends a failure.
func (t *target) pass(now time.Time) bool {
	t.failing, t.failures, t.reason, t.passed = false, 0, "", now
	return true
}
