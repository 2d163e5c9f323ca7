package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// kernel is IPVS in one network namespace and IP family, as this engine sees it. What
// is to be deleted and is not there is no error.
type kernel interface {
	// List returns all virtual servers with their real servers, whoever made them.
	List() (map[serverKey]*virtual, error)
	// Glance returns them too, at a fraction of the cost: without timeouts and most
	// flags. Some may be missing, while others write, and where other network namespaces
	// have virtual servers, which the kernel counts when it goes on after a page.
	Glance() (map[serverKey]*virtual, error)
	// Get returns one; nil if there is none.
	Get(key serverKey) (*virtual, error)
	// Connections counts what goes on at each real server of a virtual server.
	Connections(key serverKey) (map[netip.AddrPort]int, error)
	Put(key serverKey, s settings, as change) error
	Delete(key serverKey) error
	PutReal(key serverKey, real netip.AddrPort, weight int, as change) error
	DeleteReal(key serverKey, real netip.AddrPort) error
}

// change says whether something is there already.
type change uint8

const (
	create change = iota
	update
)

// table is what the kernel holds of ours. It is the state machine of draining too:
//
//	             PutReal 1                wanted no more: PutReal 0
//	(not there) ──────────> takes new ────────────────────────────> drains
//	      ^                    ^   └── UDP: DeleteReal ──> (not there)  │
//	      │                    └────── wanted again: PutReal 1 ────────┤
//	      └──────────── idle, or for too long: DeleteReal ─────────────┘
//
// A virtual server that nobody wants any more goes with the last of its real servers.
type table struct {
	kernel kernel
	drain  time.Duration
	now    func() time.Time
	writes int
	known  map[serverKey]*entry
	// draining are the virtual servers to look after.
	draining map[serverKey]bool
	// servers counts the virtual servers of an address, and left are the addresses that
	// have lost one.
	servers map[netip.Addr]int
	left    map[netip.Addr]bool
}

// entry is a virtual server of ours.
type entry struct {
	settings

	wanted bool
	reals  map[netip.AddrPort]*realServer
}

type realServer struct {
	weight int
	// until is when it is deleted, busy or not; zero unless it drains.
	until time.Time
}

func newTable(k kernel, drain time.Duration, now func() time.Time) *table {
	return &table{
		kernel: k, drain: drain, now: now, known: map[serverKey]*entry{}, draining: map[serverKey]bool{},
		servers: map[netip.Addr]int{}, left: map[netip.Addr]bool{},
	}
}

// adopt takes over a virtual server that the kernel has. Who has weight 0 may have
// been draining when a predecessor ended.
func (t *table) adopt(key serverKey, v *virtual) {
	e := &entry{settings: v.settings, reals: make(map[netip.AddrPort]*realServer, len(v.reals))}
	for addr, weight := range v.reals {
		e.reals[addr] = &realServer{weight: weight}
		if weight == 0 {
			e.reals[addr].until = t.now().Add(t.drain)
			t.draining[key] = true
		}
	}
	t.put(key, e)
}

// damage names something of ours that the kernel holds otherwise; nothing if all is well.
func (t *table) damage() (string, error) {
	there, err := t.kernel.Glance()
	if err != nil {
		return "", err
	}
	for key, e := range t.known {
		if e.differs(key, there[key]) == "" {
			continue
		}
		v, err := t.kernel.Get(key)
		if err != nil {
			return "", err
		}
		if text := e.differs(key, v); text != "" {
			return text, nil
		}
	}
	return "", nil
}

// differs names what of an entry is otherwise in the kernel.
func (e *entry) differs(key serverKey, v *virtual) string {
	same := func(weight int, r *realServer) bool { return weight == r.weight }
	switch {
	case v == nil || v.scheduler != e.scheduler || (v.flags^e.flags)&flagPersistent != 0:
		return fmt.Sprintf("virtual server %v", key)
	case !maps.EqualFunc(v.reals, e.reals, same):
		return fmt.Sprintf("real servers of virtual server %v", key)
	}
	return ""
}

func (t *table) put(key serverKey, e *entry) {
	t.known[key] = e
	t.servers[key.addr.Addr()]++
}

// inherit takes over, from a table of the same engine, since when real servers drain.
func (t *table) inherit(before *table, key serverKey) {
	if before == nil || before.known[key] == nil {
		return
	}
	for addr, r := range t.known[key].reals {
		if old := before.known[key].reals[addr]; old != nil && !r.until.IsZero() && !old.until.IsZero() {
			r.until = old.until
		}
	}
}

// set brings a virtual server to what it must be: new real servers come before old
// ones go. One without new real servers is there as long as it has others.
func (t *table) set(key serverKey, want *virtual) error {
	e := t.known[key]
	if e == nil && len(want.reals) == 0 {
		return nil
	}
	if e == nil || e.settings != want.settings {
		as := update
		if e == nil {
			as = create
		}
		if err := t.write(t.kernel.Put(key, want.settings, as)); err != nil {
			return fmt.Errorf("put virtual server %v with scheduler %s: %w", key, want.scheduler, err)
		}
		if e == nil {
			e = &entry{reals: map[netip.AddrPort]*realServer{}}
			t.put(key, e)
		}
		e.settings = want.settings
	}
	e.wanted = len(want.reals) > 0
	var errs []error
	for _, addr := range slices.SortedFunc(maps.Keys(want.reals), netip.AddrPort.Compare) {
		errs = append(errs, t.setReal(key, e, addr, want.reals[addr]))
	}
	for _, addr := range slices.SortedFunc(maps.Keys(e.reals), netip.AddrPort.Compare) {
		if _, ok := want.reals[addr]; ok {
			continue
		}
		if want.serves(addr) { // it terminates, or a policy has changed
			errs = append(errs, t.setReal(key, e, addr, 0))
			continue
		}
		errs = append(errs, t.retire(key, e, addr))
	}
	return errors.Join(append(errs, t.deleteIdle(key, e))...)
}

func (t *table) setReal(key serverKey, e *entry, addr netip.AddrPort, weight int) error {
	r, as := e.reals[addr], update
	switch {
	case r == nil:
		r, as = &realServer{}, create
	case r.weight == weight:
		r.until = time.Time{}
		return nil
	}
	if err := t.write(t.kernel.PutReal(key, addr, weight, as)); err != nil {
		return fmt.Errorf("put %s: %w", object(key, addr), err)
	}
	r.weight, r.until = weight, time.Time{}
	e.reals[addr] = r
	return nil
}

// retire lets a real server take no new connections. Datagrams have none to finish.
func (t *table) retire(key serverKey, e *entry, addr netip.AddrPort) error {
	r := e.reals[addr]
	if key.protocol == desired.UDP {
		return t.deleteReal(key, e, addr)
	}
	if !r.until.IsZero() {
		return nil
	}
	if r.weight != 0 {
		if err := t.write(t.kernel.PutReal(key, addr, 0, update)); err != nil {
			return fmt.Errorf("drain %s: %w", object(key, addr), err)
		}
	}
	r.weight, r.until = 0, t.now().Add(t.drain)
	t.draining[key] = true
	return nil
}

func (t *table) deleteReal(key serverKey, e *entry, addr netip.AddrPort) error {
	if err := t.write(t.kernel.DeleteReal(key, addr)); err != nil {
		return fmt.Errorf("delete %s: %w", object(key, addr), err)
	}
	delete(e.reals, addr)
	return nil
}

// remove drains a virtual server of which nothing is wanted any more.
func (t *table) remove(key serverKey) error {
	e := t.known[key]
	if e == nil {
		return nil
	}
	e.wanted = false
	var errs []error
	for _, addr := range slices.SortedFunc(maps.Keys(e.reals), netip.AddrPort.Compare) {
		errs = append(errs, t.retire(key, e, addr))
	}
	return errors.Join(append(errs, t.deleteIdle(key, e))...)
}

// deleteIdle deletes a virtual server that nobody wants, when it has no real servers.
func (t *table) deleteIdle(key serverKey, e *entry) error {
	if e.wanted || len(e.reals) > 0 {
		return nil
	}
	if err := t.write(t.kernel.Delete(key)); err != nil {
		return fmt.Errorf("delete virtual server %v: %w", key, err)
	}
	delete(t.known, key)
	delete(t.draining, key)
	addr := key.addr.Addr()
	if t.servers[addr]--; t.servers[addr] == 0 {
		delete(t.servers, addr)
	}
	t.left[addr] = true
	return nil
}

// tend deletes the real servers that have drained, or have had their time. What
// fails is tried again the next time.
func (t *table) tend() error {
	var errs []error
	for key := range t.draining {
		errs = append(errs, t.tendOne(key, t.known[key]))
	}
	return errors.Join(errs...)
}

func (t *table) tendOne(key serverKey, e *entry) error {
	busy, err := t.kernel.Connections(key)
	if err != nil {
		return fmt.Errorf("count connections of virtual server %v: %w", key, err)
	}
	now, left := t.now(), false
	var errs []error
	for _, addr := range slices.SortedFunc(maps.Keys(e.reals), netip.AddrPort.Compare) {
		until := e.reals[addr].until
		if until.IsZero() {
			continue
		}
		if busy[addr] > 0 && now.Before(until) {
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
