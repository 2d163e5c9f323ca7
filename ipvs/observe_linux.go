package ipvs

import (
	"context"
	"io"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// observe reads the state of the kernel. It drops the state of all service ports, which a
// full update sets again.
func (e *engine) observe(ctx context.Context) error {
	here, elsewhere, err := e.device.addresses()
	if err != nil {
		return err
	}
	all, err := e.kernel.List()
	if err != nil {
		return err
	}
	found, err := e.rules.Frontends(ctx)
	if err != nil {
		return err
	}
	owned := e.owned(found, elsewhere)
	e.totals.observe(all)
	before := e.table
	e.table = newTable(e.kernel, e.config.Drain, time.Now)
	e.table.totals = e.totals
	for key, v := range all {
		addr := key.VIP
		claimed := e.claimed != nil && e.claimed(key) && slices.Contains(elsewhere, addr)
		if e.excluded(addr) || !here[addr] && !owned[key] && !claimed {
			continue
		}
		e.table.adopt(key, v)
		e.table.inheritDeadlines(before, key)
	}
	e.boundVIPs, e.local, e.reported = here, elsewhere, false
	e.vipUses, e.table.idle = map[netip.Addr]int{}, maps.Clone(here)
	e.services = map[changetracker.ServicePortName]portState{}
	e.frontends, e.found = map[desired.Key]*desired.Service{}, found
	e.owners, e.nodePorts = map[serverKey]changetracker.ServicePortName{}, map[serverKey]claim{}
	if e.totals != nil {
		e.totals.owners, e.totals.servers = e.owners, e.table.virtuals
	}
	return nil
}

// owned returns the virtual servers on addresses of other devices that belong to this
// instance, because the rules, perhaps of a predecessor, or the table contain them.
func (e *engine) owned(frontends map[desired.Key]bool, local []netip.Addr) map[serverKey]bool {
	owned := map[serverKey]bool{}
	if e.left != nil {
		maps.Copy(owned, e.left.servers.keys)
	}
	for f := range frontends {
		addrs := []netip.Addr{f.VIP}
		if !f.VIP.IsValid() {
			addrs = local
		}
		for _, f.VIP = range addrs {
			owned[f] = true
		}
	}
	if e.table != nil {
		for key := range e.table.virtuals {
			owned[key] = true
		}
	}
	return owned
}

// Dump is for proxier.Abilities: it prints the instance's virtual servers and rules.
func (e *engine) Dump(ctx context.Context, w io.Writer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := map[serverKey]*virtual{}
	if e.table != nil {
		for key, known := range e.table.virtuals {
			all[key] = &virtual{settings: known.settings, reals: map[netip.AddrPort]int{}}
			for addr, r := range known.reals {
				all[key].reals[addr] = r.weight
			}
		}
	}
	if _, err := io.WriteString(w, text(all)); err != nil {
		return err
	}
	return e.rules.Dump(ctx, w)
}
