package ipvs

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// leavingServers returns the virtual servers that no service port will have, and that may
// still be there, and the frontends without virtual server whose VIP may be. The rules refuse
// new connections there until they are gone: otherwise clients outside the source ranges would
// reach endpoints, others programs of the node, and a successor could not recognize the
// virtual server.
func (e *engine) leavingServers(update *desired.Update) map[serverKey]bool {
	draining := maps.Clone(e.table.draining)
	if update.Full {
		for key := range e.table.virtuals {
			draining[key] = true
		}
		for f := range e.found {
			addVIP(draining, f)
		}
	}
	changed, inRules := map[changetracker.ServicePortName]bool{}, map[desired.Key]bool{}
	for i := range update.Changes {
		c := &update.Changes[i]
		changed[c.Name] = true
		e.addServers(draining, c.Name)
		for f := range frontends(c.After) {
			inRules[f] = true
		}
	}
	served := func(f desired.Key) bool {
		s := e.frontends[f]
		return inRules[f] || s != nil && !changed[s.Name]
	}
	maps.DeleteFunc(draining, func(key serverKey, _ bool) bool {
		nodePort := desired.Key{Protocol: key.Protocol, Port: key.Port}
		onNode := slices.Contains(e.local, key.VIP)
		return e.table.virtuals[key] == nil && !e.boundVIPs[key.VIP] || served(key) || served(nodePort) && onNode
	})
	return draining
}

// addVIP adds a frontend, unless it is a node port.
func addVIP(to map[serverKey]bool, f desired.Key) {
	if f.VIP.IsValid() {
		to[f] = true
	}
}

// addServers adds the virtual servers of a service port, and its VIPs.
func (e *engine) addServers(to map[serverKey]bool, name changetracker.ServicePortName) {
	p := e.services[name]
	for _, key := range p.keys {
		if e.owners[key] == name {
			to[key] = true
		}
	}
	for f := range frontends(p.service) {
		if e.frontends[f] == p.service {
			addVIP(to, f)
		}
	}
}

// admission returns the part of a frontend that says who may connect.
func admission(f *desired.Frontend) desired.Frontend {
	return desired.Frontend{Action: f.Action, ShortCircuit: f.ShortCircuit, Restricted: f.Restricted, SourceRanges: f.SourceRanges}
}

// held returns the frontends where the rules drop new connections until the virtual servers
// are written, as rules and virtual servers cannot change at once. A client sends again what
// is dropped, and gives up when it is refused. Frontends are held if they open while their
// virtual servers change: clients that were refused would reach endpoints from before, or
// programs of the node. They are also held while a virtual server has no scheduler.
func (e *engine) held(wanted []wantedPort) map[desired.Key]bool {
	held, holds := map[desired.Key]bool{}, e.holds(e.local)
	for i := range wanted {
		w := &wanted[i]
		for key, v := range w.virtuals {
			f := key
			if v.nodePort {
				f.VIP = netip.Addr{}
			}
			isNew := !e.boundVIPs[key.VIP] && holds(key.VIP)
			if e.table.reschedules(key, v) || (isNew || e.table.redirects(key, v)) && e.opens(w.service, f) {
				held[f] = true
			}
		}
	}
	return held
}

// opens reports whether a frontend may accept connections which the rules refuse now.
func (e *engine) opens(s *desired.Service, key desired.Key) bool {
	before, f := frontendOf(e.frontends[key], key), frontendOf(s, key)
	if f == nil || before != nil && admission(before).Equal(admission(f)) {
		return false
	}
	return (f.Action == desired.Forward || f.ShortCircuit) && !e.found[key]
}

// frontendOf returns a frontend of a service port, nil if it has none with the key.
func frontendOf(s *desired.Service, key desired.Key) *desired.Frontend {
	for k, f := range frontends(s) {
		if k == key {
			return f
		}
	}
	return nil
}

// holding returns an update that drops new connections to the frontends in held, and the changes
// that accept them again.
func holding(update desired.Update, held map[desired.Key]bool) (first desired.Update, then []desired.Change) {
	if len(held) == 0 {
		return update, nil
	}
	update.Changes = slices.Clone(update.Changes)
	for i := range update.Changes {
		c := &update.Changes[i]
		isHeld := func(f desired.Frontend) bool { return held[c.After.Key(&f)] }
		if c.After == nil || !slices.ContainsFunc(c.After.Frontends, isHeld) {
			continue
		}
		then = append(then, desired.Change{Name: c.Name, After: c.After})
		s := *c.After
		s.Frontends = slices.Clone(s.Frontends)
		for i := range s.Frontends {
			if f := &s.Frontends[i]; isHeld(*f) {
				f.Action, f.ShortCircuit = desired.Drop, false
			}
		}
		c.After = &s
	}
	return update, then
}

// waitForPackets waits until each packet that was on its way has left the network stack. The kernel
// processes packets in read-side critical sections of RCU; membarrier(2) waits for all of them,
// which takes some 10 ms. Where it is forbidden, a connection that began at that moment may be
// refused.
func waitForPackets() {
	const global = 1 // MEMBARRIER_CMD_GLOBAL of linux/membarrier.h
	_, _, _ = unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0)
}

// release makes changes that accept new connections again, and removes from the rules what they
// refused until it was gone.
func (e *engine) release(ctx context.Context, changes []desired.Change) error {
	refused := maps.Clone(e.refused)
	maps.DeleteFunc(refused, func(key serverKey, _ bool) bool { return e.table.virtuals[key] == nil })
	if len(changes) == 0 && len(refused) == len(e.refused) {
		return nil
	}
	_, err := e.rules.Apply(ctx, desired.Update{Family: e.family, Changes: changes, Globals: e.globals}, e.behind(refused))
	if err == nil {
		e.refused = refused
	}
	return err
}

// redirects reports whether set will change which real servers get new connections.
func (t *table) redirects(key serverKey, want *virtual) bool {
	taking := 0 // what is wanted, less what is there
	for _, weight := range want.reals {
		taking += min(weight, 1)
	}
	if e := t.virtuals[key]; e != nil {
		for addr, r := range e.reals {
			if r.weight == 0 {
				continue
			}
			if want.reals[addr] == 0 {
				return true
			}
			taking--
		}
	}
	return taking != 0
}
