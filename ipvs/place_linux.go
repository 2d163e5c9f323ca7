package ipvs

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// wantedPort is a service port with what it needs here.
type wantedPort struct {
	service *desired.Service
	// vips are the addresses that it needs on our device.
	vips     []netip.Addr
	virtuals map[serverKey]*virtual
}

// placed is a service port with its virtual servers, and the VIPs that it needs.
type placed struct {
	keys []serverKey // sorted
	vips []netip.Addr
}

// claim is a virtual server that a service port wants for a node port.
type claim struct {
	name    changetracker.ServicePortName
	virtual *virtual
}

func (e *Engine) wanted(update *desired.Update) []wantedPort {
	p := planner{config: &e.config, nodeAddrs: nodePortAddrs(e.local, update.Globals.NodePortAddresses)}
	all := make([]wantedPort, 0, len(update.Changes))
	for s := range update.Services() {
		w := wantedPort{service: s, vips: e.vipsOf(s), virtuals: p.virtuals(s)}
		maps.DeleteFunc(w.virtuals, func(key serverKey, _ *virtual) bool { return e.excluded(key.addr.Addr()) })
		all = append(all, w)
	}
	return all
}

// vipsOf are the addresses that a service port needs on our device.
func (e *Engine) vipsOf(s *desired.Service) []netip.Addr {
	var vips []netip.Addr
	for i := range s.Frontends {
		if vip := s.Frontends[i].VIP; vip.IsValid() && e.holds(vip) {
			vips = append(vips, vip)
		}
	}
	return slices.Compact(vips) // frontends are sorted by VIP
}

// holds says whether our device is where a VIP is: not if the node has it anyway, or if
// it is excluded.
func (e *Engine) holds(vip netip.Addr) bool {
	return !slices.Contains(e.local, vip) && !e.excluded(vip)
}

func (e *Engine) excluded(a netip.Addr) bool {
	return slices.ContainsFunc(e.config.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}

// bind puts addresses on our device.
func (e *Engine) bind(wanted []wantedPort) error {
	var added []netip.Addr
	for i := range wanted {
		for _, a := range wanted[i].vips {
			if !e.bound[a] {
				e.bound[a] = true
				added = append(added, a)
			}
		}
	}
	e.report.Writes += len(added)
	return e.device.add(added)
}

// unbind takes the addresses away that no service port needs any more, and no virtual
// server that drains. Those that remain by a failure have their turn the next time.
func (e *Engine) unbind() error {
	for addr := range e.table.left {
		e.idle[addr] = true
	}
	clear(e.table.left)
	var removed []netip.Addr
	for a := range e.idle {
		busy := e.uses[a] > 0 || e.table.servers[a] > 0 && !slices.Contains(e.local, a)
		if e.bound[a] && !busy && !e.excluded(a) {
			removed = append(removed, a)
		}
	}
	if err := e.device.remove(removed); err != nil {
		return err
	}
	for _, a := range removed {
		delete(e.bound, a)
	}
	clear(e.idle)
	e.report.Writes += len(removed)
	return nil
}

// use counts the service ports that need addresses.
func (e *Engine) use(vips []netip.Addr, n int) {
	for _, a := range vips {
		if e.uses[a] += n; e.uses[a] == 0 {
			delete(e.uses, a)
			e.idle[a] = true
		}
	}
}

// place brings the virtual servers of a service port to what they must be.
func (e *Engine) place(w *wantedPort) error {
	name, before := w.service.Name, e.services[w.service.Name]
	now := &placed{keys: slices.SortedFunc(maps.Keys(w.virtuals), compareKeys), vips: w.vips}
	var errs []error
	for _, key := range now.keys {
		v := w.virtuals[key]
		if v.nodePort {
			e.nodePorts[key] = claim{name, v}
		}
		if user, used := e.users[key]; used && user != name && v.nodePort {
			continue // a VIP that is an address of the node goes before node ports
		}
		e.users[key] = name
		errs = append(errs, e.blame(name, e.table.set(key, v)))
	}
	e.use(now.vips, 1)
	if before != nil {
		e.use(before.vips, -1)
		errs = append(errs, e.leave(name, before.keys, now.keys))
	}
	e.services[name] = now
	return errors.Join(errs...)
}

// leave removes the virtual servers that a service port had and has not any more.
func (e *Engine) leave(name changetracker.ServicePortName, before, now []serverKey) error {
	var errs []error
	for _, key := range before {
		if _, found := slices.BinarySearchFunc(now, key, compareKeys); found {
			continue
		}
		if e.nodePorts[key].name == name {
			delete(e.nodePorts, key)
		}
		if e.users[key] == name {
			errs = append(errs, e.vacate(key))
		}
	}
	return errors.Join(errs...)
}

// vacate gives a virtual server to the node port that had to make room, or to nobody.
func (e *Engine) vacate(key serverKey) error {
	next, waits := e.nodePorts[key]
	if !waits {
		delete(e.users, key)
		return e.table.remove(key)
	}
	e.users[key] = next.name
	return e.blame(next.name, e.table.set(key, next.virtual))
}

func (e *Engine) forget(name changetracker.ServicePortName) error {
	p := e.services[name]
	if p == nil {
		return nil
	}
	delete(e.services, name)
	e.use(p.vips, -1)
	return e.leave(name, p.keys, nil)
}

// removeLeftovers removes the virtual servers of ours that no service port has.
func (e *Engine) removeLeftovers() error {
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(e.table.known), compareKeys) {
		if _, used := e.users[key]; !used {
			errs = append(errs, e.table.remove(key))
		}
	}
	return errors.Join(errs...)
}

// blame makes what the kernel refuses the service port's own trouble. After any other
// error nobody knows what the kernel holds.
func (e *Engine) blame(name changetracker.ServicePortName, err error) error {
	if err == nil || !refused(err) {
		return err
	}
	e.failed = append(e.failed, &proxier.ServiceError{Name: name, Err: err, Partial: true})
	return nil
}

// refused says whether an error consists of refusals only.
func refused(err error) bool {
	switch err { //nolint:errorlint // it goes through the tree itself
	case proxier.ErrNotSupported, unix.EINVAL, unix.ERANGE:
		return true
	}
	switch e := err.(type) { //nolint:errorlint // as above
	case *proxier.UnsupportedError:
		return true
	case interface{ Unwrap() error }:
		return refused(e.Unwrap())
	case interface{ Unwrap() []error }:
		return !slices.ContainsFunc(e.Unwrap(), func(err error) bool { return !refused(err) })
	}
	return false
}
