package history

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	staleness "github.com/serviceplane/serviceplane/internal/flows"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// side is what a process does beside the engine: conntrack, health checks, announcements,
// reports. It checks the calls themselves; checkSide checks their results.
type side struct {
	proxier.Health

	calls *Calls
	flows *flows

	mu       sync.Mutex // guards all below
	wrong    error
	written  int
	deleted  int // flows
	reported int // deleted flows
	families map[v1.IPFamily]*familySide
}

// familySide is the part of one IP family.
type familySide struct {
	last      proxier.SyncReport
	triggers  map[time.Time]bool
	health    map[types.NamespacedName]healthCheck
	announced map[desired.Key]proxier.Announcement
}

type healthCheck struct {
	port  uint16
	local int // endpoints
}

func newSide(calls *Calls, flows *flows) *side {
	s := &side{Health: proxier.NoHealth(), calls: calls, flows: flows, families: map[v1.IPFamily]*familySide{}}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		s.families[family] = &familySide{
			triggers: map[time.Time]bool{}, health: map[types.NamespacedName]healthCheck{}, announced: map[desired.Key]proxier.Announcement{},
		}
	}
	return s
}

func (s *side) writes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.written
}

// ObserveSync implements proxier.Observer.
func (s *side) ObserveSync(r proxier.SyncReport) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written += r.Apply.Writes
	s.reported += r.FlowsDeleted
	of := s.families[r.Family]
	of.last = r
	for _, at := range r.Triggers {
		if of.triggers[at] {
			s.wrong = errors.Join(s.wrong, fmt.Errorf("%s: the trigger of %v is reported again", r.Family, at))
		}
		of.triggers[at] = true
	}
}

// Update implements proxier.Health.
func (s *side) Update(family v1.IPFamily, u proxier.HealthUpdate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	checks := s.families[family].health
	if u.Full {
		clear(checks)
	} else if len(u.Ports) == 0 {
		s.wrong = errors.Join(s.wrong, errors.New("an update of health checks changes nothing"))
	}
	for name, port := range u.Ports {
		if delete(checks, name); port != 0 {
			checks[name] = healthCheck{port, u.LocalEndpoints[name]}
		}
	}
}

// Announce implements proxier.Announcer.
func (s *side) Announce(_ context.Context, family v1.IPFamily, list []proxier.Announcement) error {
	return s.announcing(func() {
		for _, a := range list {
			if a.Port.Name != a.Name {
				s.wrong = errors.Join(s.wrong, fmt.Errorf("the port of %v is %v", a, a.Port))
			}
			if s.families[family].announced[a.Key] == a && s.calls.happened() == 0 {
				s.wrong = errors.Join(s.wrong, fmt.Errorf("%v is announced again", a))
			}
			s.families[family].announced[a.Key] = a
		}
	})
}

// Withdraw implements proxier.Announcer.
func (s *side) Withdraw(_ context.Context, family v1.IPFamily, list []proxier.Announcement) error {
	return s.announcing(func() {
		for _, a := range list {
			if _, ok := s.families[family].announced[a.Key]; !ok && s.calls.happened() == 0 {
				s.wrong = errors.Join(s.wrong, fmt.Errorf("%v is withdrawn, but not announced", a))
			}
			delete(s.families[family].announced, a.Key)
		}
	})
}

func (s *side) announcing(do func()) error {
	return s.calls.Do(func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		do()
		return nil
	})
}

// clean is that of proxier.Conntrack.
func (s *side) clean(_ context.Context, family v1.IPFamily, check desired.FlowCheck) (deleted int, err error) {
	err = s.calls.Do(func() error {
		deleted = s.flows.clean(family, &check)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.deleted += deleted
		return nil
	})
	return deleted, err
}

// flowKey is a connection in connection tracking.
type flowKey struct {
	family v1.IPFamily
	key    desired.Key
	server netip.AddrPort
}

// flows is the connection tracking of a node.
type flows struct {
	mu    sync.Mutex
	there owners
	// began are those that were there after the last check.
	began owners
	// stale are the flows that some state of the API server has made stale since they began, and the
	// flows of a Service that the engine refuses.
	stale map[flowKey]bool
	// another says that another process started since the last check.
	another bool
}

// owners are flows, and the service port of each.
type owners map[flowKey]changetracker.ServicePortName

func newFlows() *flows { return &flows{there: owners{}, stale: map[flowKey]bool{}} }

func (f *flows) restarted() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.another = true
}

// clean does what package conntrack does: it deletes the flows that a check finds stale.
func (f *flows) clean(family v1.IPFamily, check *desired.FlowCheck) (deleted int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	judge := staleness.NewJudge(desired.FlowCheck{Frontends: check.Frontends, ServiceCIDRs: check.ServiceCIDRs}, nil)
	for k := range f.there {
		if k.family == family && judge.Stale(k.flow()) {
			delete(f.there, k)
			deleted++
		}
	}
	return deleted
}

func (k flowKey) flow() staleness.Flow {
	return staleness.Flow{Protocol: k.key.Protocol, Dialled: netip.AddrPortFrom(k.key.VIP, k.key.Port), Server: k.server, Answered: true}
}

// inAny is false for the VIP of a node port, which is no address.
func inAny(cidrs []netip.Prefix, vip netip.Addr) bool {
	return slices.ContainsFunc(cidrs, func(cidr netip.Prefix) bool { return cidr.Contains(vip) })
}

// note records which flows the present objects make stale.
func (f *flows) note(ctx context.Context, r *run) error {
	if len(f.began) == 0 {
		return nil
	}
	e, err := r.expect(ctx)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	serves := e.flows()
	for k, had := range f.began {
		has, ok := serves[k]
		if !ok || has != had && r.life != nil && r.life.refusals.has(has.Name) {
			f.stale[k] = true
		}
	}
	return nil
}

// check compares the flows with the model, and lets new ones begin.
func (f *flows) check(e *expected) (err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := e.flows()
	for k := range f.there {
		unknown := f.another && !inAny(serviceCIDRs(), k.key.VIP) && !e.has(k)
		if _, serves := next[k]; !serves && !unknown {
			err = errors.Join(err, fmt.Errorf("the flow %v is stale and was not deleted", k))
		}
	}
	for k := range f.began {
		_, serves := next[k]
		if _, there := f.there[k]; serves && !there && !f.stale[k] {
			err = errors.Join(err, fmt.Errorf("the flow %v was deleted, and was never stale", k))
		}
	}
	f.there, f.began, f.stale, f.another = next, maps.Clone(next), map[flowKey]bool{}, false
	return err
}

// expected is what the objects require beside the kernel.
type expected struct {
	services map[v1.IPFamily]map[changetracker.ServicePortName]*desired.Service
	updates  map[v1.IPFamily]desired.Update // full
	side     *side
	status   proxier.Status
}

// expect gives the objects to a Provider without a data plane.
func (r *run) expect(ctx context.Context) (*expected, error) {
	recorders := map[v1.IPFamily]*proxiertest.RecordingEngine{}
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		recorders[family] = &proxiertest.RecordingEngine{}
		engines[family] = recorders[family]
	}
	e := &expected{services: map[v1.IPFamily]map[changetracker.ServicePortName]*desired.Service{}, updates: map[v1.IPFamily]desired.Update{}}
	calls := &Calls{}
	e.side = newSide(calls, newFlows())
	l, err := r.newLife(ctx, calls, e.side, engines)
	if err != nil {
		return nil, err
	}
	err = proxiertest.Sync(ctx, l)
	e.status = l.Status()
	if err = errors.Join(err, l.end()); err != nil {
		return nil, err
	}
	for family, recorder := range recorders {
		if updates := recorder.Updates(); len(updates) > 0 { // not of a family that the Plane lacks
			e.services[family], e.updates[family] = recorder.Services(), updates[0]
		}
	}
	return e, nil
}

// flows yields each UDP flow that there may be.
func (e *expected) flows() owners {
	all := owners{}
	for family, services := range e.services {
		for _, s := range services {
			for i := range s.Frontends {
				for server := range s.Serving.All() {
					if s.Protocol == desired.UDP {
						all[flowKey{family, s.Key(&s.Frontends[i]), server}] = s.Name
					}
				}
			}
		}
	}
	return all
}

// has reports whether there is a frontend with the flow's key.
func (e *expected) has(k flowKey) bool {
	for _, s := range e.services[k.family] {
		if slices.ContainsFunc(s.Frontends, func(f desired.Frontend) bool { return s.Key(&f) == k.key }) {
			return true
		}
	}
	return false
}

// checkSide compares what is beside the kernel with the model.
func (r *run) checkSide(ctx context.Context) error {
	e, err := r.expect(ctx)
	if err != nil {
		return err
	}
	if !hasSockets(r.plane) {
		err = r.flows.check(e)
	}
	have, want := r.life.side, e.side
	reported := r.soonNil(func() error { // a repair may still run
		return errors.Join(have.checkReports(want), checkStatus(r.life.Status(), e.status, r.life.told))
	})
	have.mu.Lock()
	defer have.mu.Unlock()
	err = errors.Join(err, have.wrong, reported)
	same := func(a, b proxier.Announcement) bool {
		return a.Key == b.Key && a.Kind == b.Kind && a.Name == b.Name && a.Port.Equal(b.Port)
	}
	for family, h := range have.families {
		w := want.families[family]
		if !maps.Equal(h.health, w.health) {
			err = errors.Join(err, fmt.Errorf("%s: health checks are %+v, want %+v", family, h.health, w.health))
		}
		if !maps.EqualFunc(h.announced, w.announced, same) {
			err = errors.Join(err, fmt.Errorf("%s: announced is %v, want %v", family, h.announced, w.announced))
		}
	}
	return err
}

// checkReports compares what was reported with what happened, and with the model.
func (s *side) checkReports(want *side) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls.happened() == 0 && s.deleted != s.reported {
		err = fmt.Errorf("%d flows were deleted, %d are reported", s.deleted, s.reported)
	}
	for family, of := range s.families {
		h, w := of.last, want.families[family].last
		if h.ServicePorts != w.ServicePorts || h.Failed != 0 || h.Err != nil || h.Changes != 0 ||
			h.NoLocalInternal != w.NoLocalInternal || h.NoLocalExternal != w.NoLocalExternal {
			err = errors.Join(err, fmt.Errorf("%s: the report of an idle sync is %+v, want the counts of %+v", family, h, w))
		}
	}
	return err
}

// checkStatus compares what a process says about itself with what one says that has just
// started. told counts the events.
func checkStatus(have, want proxier.Status, told changetracker.EventCounts) (err error) {
	for family, w := range want.Families {
		h := have.Families[family]
		if !h.Synced || len(h.Failed) > 0 || h.LastError != nil || h.ServicePorts != w.ServicePorts || h.NoLocalInternal != w.NoLocalInternal ||
			h.NoLocalExternal != w.NoLocalExternal || !h.PendingSince.IsZero() || !h.StaleSince.IsZero() {
			err = errors.Join(err, fmt.Errorf("%s: the status is %+v, want the counts of %+v", family, h, w))
		}
	}
	if !slices.Equal(have.Problems, want.Problems) || have.Tracked != told || len(have.Waiting) > 0 {
		err = errors.Join(err, fmt.Errorf("problems are %v of %+v, waiting for %v; want %v of %+v", have.Problems, have.Tracked, have.Waiting, want.Problems, told))
	}
	return err
}
