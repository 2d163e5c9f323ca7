package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// kernel is IPVS in one network namespace for one IP family. Deleting what does not exist
// is not an error.
type kernel interface {
	// List returns all virtual servers with their real servers, also those of other programs.
	List() (map[serverKey]*virtual, error)
	// ListFast returns them at a fraction of the cost, without timeouts and most flags. Some
	// may be missing: after a concurrent write, or if other network namespaces have virtual
	// servers, which the kernel counts when it continues after a page.
	ListFast() (map[serverKey]*virtual, error)
	// Get returns one virtual server, nil if it does not exist.
	Get(key serverKey) (*virtual, error)
	// Loads returns the connections of each real server of a virtual server.
	Loads(key serverKey) (loads, error)
	// Put and PutReal update an object that is not new, and that must be there.
	Put(key serverKey, s settings, isNew bool) error
	Delete(key serverKey) error
	PutReal(key serverKey, real netip.AddrPort, weight int, how ForwardingMethod, isNew bool) error
	DeleteReal(key serverKey, real netip.AddrPort) error
	setTimeouts(c *Config) error
	Close()
}

// load is how many connections a real server has, and has had since it was added.
type load struct{ open, total uint32 }

type loads map[netip.AddrPort]load

// table holds the virtual servers of an instance, and drains real servers:
//
//	           PutReal 1               no longer wanted: PutReal 0
//	(absent) ──────────> takes new ─────────────────────────────> draining
//	      ^                 ^   └── UDP: DeleteReal ──> (absent)      │
//	      │                 └────── wanted again: PutReal 1 ──────────┤
//	      └──────────── idle, or deadline passed: DeleteReal ─────────┘
//
// A virtual server that is no longer wanted is deleted with its last real server.
type table struct {
	kernel   kernel
	drain    time.Duration
	now      func() time.Time
	writes   int
	virtuals map[serverKey]*virtualServer
	// draining are the virtual servers with draining real servers.
	draining map[serverKey]bool
	// perAddr counts the virtual servers of each address; idle are the addresses that may not be
	// needed any more.
	perAddr map[netip.Addr]int
	idle    map[netip.Addr]bool
	// lacks are the schedulers that the kernel does not have.
	lacks  map[string]bool
	totals *totals // nil if connections are not counted
}

// virtualServer is a virtual server of the instance.
type virtualServer struct {
	settings

	wanted bool
	reals  map[netip.AddrPort]*realServer
}

// unknownWeight is one that no real server has.
const unknownWeight = -1

type realServer struct {
	weight int
	// deadline is when it is deleted even with connections; zero unless it drains.
	deadline time.Time
}

func newTable(k kernel, drain time.Duration, now func() time.Time) *table {
	return &table{
		kernel: k, drain: drain, now: now, virtuals: map[serverKey]*virtualServer{}, draining: map[serverKey]bool{},
		perAddr: map[netip.Addr]int{}, idle: map[netip.Addr]bool{}, lacks: map[string]bool{},
	}
}

// adopt adds a virtual server that the kernel has. A real server with weight 0 may have
// been draining when a predecessor ended.
func (t *table) adopt(key serverKey, v *virtual) {
	e := &virtualServer{settings: v.settings, reals: make(map[netip.AddrPort]*realServer, len(v.reals))}
	for addr, weight := range v.reals {
		e.reals[addr] = &realServer{weight: weight}
		if weight == 0 {
			e.reals[addr].deadline = t.now().Add(t.drain)
			t.draining[key] = true
		}
	}
	t.put(key, e)
}

// findDamage names a virtual server that differs in the kernel, "" if none does.
func (t *table) findDamage() (string, error) {
	found, err := t.kernel.ListFast()
	if err != nil {
		return "", err
	}
	for key, e := range t.virtuals {
		if e.difference(key, found[key]) == "" {
			continue
		}
		v, err := t.kernel.Get(key)
		if err != nil {
			return "", err
		}
		if text := e.difference(key, v); text != "" {
			return text, nil
		}
	}
	return "", nil
}

// difference names what differs in the kernel.
func (e *virtualServer) difference(key serverKey, v *virtual) string {
	same := func(weight int, r *realServer) bool { return weight == r.weight }
	switch {
	case v == nil || v.scheduler != e.scheduler || (v.flags^e.flags)&flagPersistent != 0:
		return fmt.Sprintf("virtual server %v", key)
	case len(v.reals) > 0 && v.forward != e.forward:
		return fmt.Sprintf("forwarding of virtual server %v", key)
	case !maps.EqualFunc(v.reals, e.reals, same):
		return fmt.Sprintf("real servers of virtual server %v", key)
	}
	return ""
}

func (t *table) put(key serverKey, e *virtualServer) {
	t.virtuals[key] = e
	t.perAddr[key.VIP]++
}

// inheritDeadlines copies the deadlines of draining real servers from the previous table.
func (t *table) inheritDeadlines(before *table, key serverKey) {
	if before == nil || before.virtuals[key] == nil {
		return
	}
	for addr, r := range t.virtuals[key].reals {
		if old := before.virtuals[key].reals[addr]; old != nil && !r.deadline.IsZero() && !old.deadline.IsZero() {
			r.deadline = old.deadline
		}
	}
}

// set writes a virtual server: it adds new real servers before it drains old ones. Without
// wanted real servers it keeps the virtual server while that has others.
func (t *table) set(key serverKey, want *virtual) error {
	e := t.virtuals[key]
	if e == nil && len(want.reals) == 0 {
		return nil
	}
	e, refusal, err := t.setSettings(key, e, want)
	if err != nil {
		return err
	}
	e.wanted = len(want.reals) > 0
	errs := []error{refusal}
	var created []netip.AddrPort
	for _, addr := range slices.SortedFunc(maps.Keys(want.reals), netip.AddrPort.Compare) {
		if t.totals != nil && e.reals[addr] == nil {
			created = append(created, addr)
		}
		errs = append(errs, t.setReal(key, e, addr, want.reals[addr]))
	}
	if len(created) > 0 {
		errs = append(errs, t.accountReturned(key, created))
	}
	return errors.Join(append(errs, t.retire(key, e, want), t.deleteIdle(key, e))...)
}

// reschedules reports whether set will change the scheduler of a virtual server. Until that is
// done the kernel has none, and refuses new connections (ip_vs_edit_service of
// net/netfilter/ipvs/ip_vs_ctl.c, which waits for an RCU grace period).
func (t *table) reschedules(key serverKey, want *virtual) bool {
	e := t.virtuals[key]
	return e != nil && e.scheduler != want.scheduler && !e.satisfy(want.settings) && !t.lacks[want.scheduler]
}

// setSettings creates a virtual server, or changes its settings; connections stay. If the
// kernel lacks the scheduler, the virtual server gets the settings instead, and refusal says
// so: the next call tries again.
func (t *table) setSettings(key serverKey, e *virtualServer, want *virtual) (_ *virtualServer, refusal, err error) {
	if e != nil && e.satisfy(want.settings) {
		return e, nil, nil
	}
	now := want.settings
	err = t.putSettings(key, e, now)
	t.lacks[now.scheduler] = errors.Is(err, proxier.ErrNotSupported)
	if t.lacks[now.scheduler] && want.instead.scheduler != "" && want.instead.scheduler != now.scheduler {
		refusal, now, err = err, want.instead, nil
		if e == nil || !e.satisfy(now) {
			err = t.putSettings(key, e, now)
		} else {
			now = e.settings
		}
	}
	if err != nil {
		return nil, nil, err
	}
	if e == nil {
		e = &virtualServer{reals: map[netip.AddrPort]*realServer{}}
		t.put(key, e)
	}
	if e.forward != now.forward {
		for _, r := range e.reals {
			r.weight = unknownWeight // so that each is written
		}
	}
	e.settings = now
	return e, refusal, nil
}

func (t *table) putSettings(key serverKey, e *virtualServer, s settings) error {
	if err := t.write(t.kernel.Put(key, s, e == nil)); err != nil {
		return fmt.Errorf("put virtual server %v with scheduler %s: %w", key, s.scheduler, err)
	}
	return nil
}

func (t *table) setReal(key serverKey, e *virtualServer, addr netip.AddrPort, weight int) error {
	r := e.reals[addr]
	isNew := r == nil
	switch {
	case isNew:
		r = &realServer{}
	case r.weight == weight:
		r.deadline = time.Time{}
		return nil
	}
	if err := t.write(t.kernel.PutReal(key, addr, weight, e.forward, isNew)); err != nil {
		return fmt.Errorf("put %s: %w", object(key, addr), err)
	}
	r.weight, r.deadline = weight, time.Time{}
	e.reals[addr] = r
	return nil
}

// retire stops new connections to the real servers that are not wanted. Those that serve, because
// they are terminating or a traffic policy has changed, stay. The others drain; UDP has no connections
// to finish, so its real servers are deleted. If connections are counted, those get no new ones
// before the last reading.
func (t *table) retire(key serverKey, e *virtualServer, want *virtual) error {
	var errs []error
	var ended []netip.AddrPort
	changes := false
	for _, addr := range slices.SortedFunc(maps.Keys(e.reals), netip.AddrPort.Compare) {
		if _, ok := want.reals[addr]; ok {
			continue
		}
		serves := want.serving.Has(addr)
		ends := !serves && key.Protocol == desired.UDP
		changes = changes || ends || e.reals[addr].weight != 0
		if serves || ends && t.totals != nil {
			errs = append(errs, t.setReal(key, e, addr, 0))
		}
		if ends {
			ended = append(ended, addr)
		} else if !serves {
			errs = append(errs, t.drainReal(key, e, addr))
		}
	}
	if changes {
		errs = append(errs, t.account(key))
	}
	for _, addr := range ended {
		errs = append(errs, t.deleteReal(key, e, addr))
	}
	return errors.Join(errs...)
}

func (t *table) drainReal(key serverKey, e *virtualServer, addr netip.AddrPort) error {
	r := e.reals[addr]
	if !r.deadline.IsZero() {
		return nil
	}
	if err := t.setReal(key, e, addr, 0); err != nil {
		return fmt.Errorf("drain: %w", err)
	}
	r.deadline = t.now().Add(t.drain)
	t.draining[key] = true
	return nil
}

func (t *table) deleteReal(key serverKey, e *virtualServer, addr netip.AddrPort) error {
	if err := t.write(t.kernel.DeleteReal(key, addr)); err != nil {
		return fmt.Errorf("delete %s: %w", object(key, addr), err)
	}
	delete(e.reals, addr)
	if t.totals != nil {
		t.totals.depart(key, addr)
	}
	return nil
}

// remove drains a virtual server that is no longer wanted.
func (t *table) remove(key serverKey) error {
	if e := t.virtuals[key]; e != nil {
		return t.set(key, &virtual{settings: e.settings})
	}
	return nil
}

// deleteIdle deletes a virtual server that is not wanted and has no real servers.
func (t *table) deleteIdle(key serverKey, e *virtualServer) error {
	if e.wanted || len(e.reals) > 0 {
		return nil
	}
	if err := t.write(t.kernel.Delete(key)); err != nil {
		return fmt.Errorf("delete virtual server %v: %w", key, err)
	}
	delete(t.virtuals, key)
	delete(t.draining, key)
	addr := key.VIP
	if t.perAddr[addr]--; t.perAddr[addr] == 0 {
		delete(t.perAddr, addr)
	}
	t.idle[addr] = true
	if t.totals != nil {
		t.totals.forget(key)
	}
	return nil
}

// deleteDrained deletes draining real servers without connections, or whose deadline has
// passed. After a failure the next call tries again.
func (t *table) deleteDrained() error {
	var errs []error
	for key := range t.draining {
		errs = append(errs, t.deleteDrainedOf(key, t.virtuals[key]))
	}
	return errors.Join(errs...)
}

func (t *table) deleteDrainedOf(key serverKey, e *virtualServer) error {
	busy, err := t.kernel.Loads(key)
	if err != nil {
		return fmt.Errorf("count connections of virtual server %v: %w", key, err)
	}
	if t.totals != nil {
		t.totals.addNow(key, busy)
	}
	now, left := t.now(), false
	var errs []error
	for _, addr := range slices.SortedFunc(maps.Keys(e.reals), netip.AddrPort.Compare) {
		until := e.reals[addr].deadline
		if until.IsZero() {
			continue
		}
		if busy[addr].open > 0 && now.Before(until) || t.totals != nil && now.Before(until.Add(statsDelay-t.drain)) {
			left = true
			continue
		}
		errs = append(errs, t.deleteReal(key, e, addr))
	}
	if err := errors.Join(append(errs, t.deleteIdle(key, e))...); err != nil || left {
		return err
	}
	delete(t.draining, key)
	return nil
}

func (t *table) write(err error) error {
	t.writes++
	return err
}
