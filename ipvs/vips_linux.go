package ipvs

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// vipsOf returns the addresses that a service port needs on the device of a node with these others.
func (e *Engine) vipsOf(s *desired.Service, local []netip.Addr) []netip.Addr {
	var vips []netip.Addr
	holds := e.holds(local)
	for i := range s.Frontends {
		if vip := s.Frontends[i].VIP; vip.IsValid() && holds(vip) {
			vips = append(vips, vip)
		}
	}
	return slices.Compact(vips) // frontends are sorted by VIP
}

// holds returns a function that reports whether a VIP belongs on the device: not if it is an
// address of the node, or excluded.
func (e *Engine) holds(local []netip.Addr) func(vip netip.Addr) bool {
	return func(vip netip.Addr) bool { return !slices.Contains(local, vip) && !e.excluded(vip) }
}

func (e *Engine) excluded(a netip.Addr) bool {
	return slices.ContainsFunc(e.config.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}

// bind adds addresses to the device.
func (e *Engine) bind(wanted []wantedPort) error {
	var added []netip.Addr
	for i := range wanted {
		for _, a := range wanted[i].vips {
			if !e.boundVIPs[a] {
				e.boundVIPs[a] = true
				added = append(added, a)
			}
		}
	}
	e.report.Writes += len(added)
	return e.device.add(added)
}

// unbind removes the addresses that neither a service port nor a draining virtual server
// needs.
func (e *Engine) unbind() error {
	var removed []netip.Addr
	for a := range e.table.idle {
		inUse := e.vipUses[a] > 0 || e.table.perAddr[a] > 0 && !slices.Contains(e.local, a)
		if e.boundVIPs[a] && !inUse && !e.excluded(a) {
			removed = append(removed, a)
		}
	}
	if err := e.device.remove(removed); err != nil {
		return err
	}
	for _, a := range removed {
		delete(e.boundVIPs, a)
	}
	clear(e.table.idle)
	e.report.Writes += len(removed)
	return nil
}

// use adds n to the number of service ports that need each address.
func (e *Engine) use(vips []netip.Addr, n int) {
	for _, a := range vips {
		if e.vipUses[a] += n; e.vipUses[a] == 0 {
			delete(e.vipUses, a)
			e.table.idle[a] = true
		}
	}
}
