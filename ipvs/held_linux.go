package ipvs

import (
	"context"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
)

// admission returns the part of a frontend that says who may connect.
func admission(f *desired.Frontend) desired.Frontend {
	return desired.Frontend{Action: f.Action, ShortCircuit: f.ShortCircuit, Restricted: f.Restricted, SourceRanges: f.SourceRanges}
}

// held returns the frontends where the rules drop new connections until the virtual servers
// are written, as rules and virtual servers cannot change at once. A client sends again what
// is dropped, and gives up when it is refused. Frontends are held if they open while their
// virtual servers change: clients that were refused would reach endpoints from before, or
// programs of the node. They are also held while a virtual server has no scheduler.
func (e *Engine) held(wanted []wantedPort) map[desired.Key]bool {
	held := map[desired.Key]bool{}
	for i := range wanted {
		w := &wanted[i]
		for key, v := range w.virtuals {
			f := key.frontend()
			if v.nodePort {
				f.VIP = netip.Addr{}
			}
			isNew := !e.boundVIPs[key.addr.Addr()] && e.holds(key.addr.Addr())
			if e.table.reschedules(key, v) || (isNew || e.table.redirects(key, v)) && e.opens(w.service, f) {
				held[f] = true
			}
		}
	}
	return held
}

// opens reports whether a frontend may accept connections which the rules refuse now.
func (e *Engine) opens(s *desired.Service, key desired.Key) bool {
	i := slices.IndexFunc(s.Frontends, func(f desired.Frontend) bool { return s.Key(&f) == key })
	if i < 0 {
		return false
	}
	f := admission(&s.Frontends[i])
	before, known := e.frontends[key]
	return (f.Action == desired.Forward || f.ShortCircuit) && (!known || !before.admission.Equal(f)) && !e.found[key]
}

// holding returns an update that drops new connections to the frontends in held.
func holding(update desired.Update, held map[desired.Key]bool) desired.Update {
	if len(held) == 0 {
		return update
	}
	update.Changes = slices.Clone(update.Changes)
	for i := range update.Changes {
		c := &update.Changes[i]
		if c.After == nil {
			continue
		}
		s := *c.After
		s.Frontends = slices.Clone(s.Frontends)
		for i := range s.Frontends {
			if f := &s.Frontends[i]; held[s.Key(f)] {
				f.Action, f.ShortCircuit = desired.Drop, false
			}
		}
		c.After = &s
	}
	return update
}

// settle waits until each packet that was on its way has left the network stack. The kernel
// processes packets in read-side critical sections of RCU; membarrier(2) waits for all of them,
// which takes some 10 ms. Where it is forbidden, a connection that began at that moment may be
// refused.
func settle() {
	const global = 1 // MEMBARRIER_CMD_GLOBAL of linux/membarrier.h
	_, _, _ = unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0)
}

// releaseHeld accepts new connections again.
func (e *Engine) releaseHeld(ctx context.Context, wanted []wantedPort, held map[desired.Key]bool) error {
	if len(held) == 0 {
		return nil
	}
	update := desired.Update{Family: e.family, Globals: e.globals}
	for i := range wanted {
		s := wanted[i].service
		if slices.ContainsFunc(s.Frontends, func(f desired.Frontend) bool { return held[s.Key(&f)] }) {
			update.Changes = append(update.Changes, desired.Change{Name: s.Name, After: s})
		}
	}
	_, err := e.rules.Apply(ctx, update, e.behind(e.refused))
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
