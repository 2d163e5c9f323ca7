package userspace

import (
	"errors"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
)

// spot tells the sockets of a service port apart.
type spot struct {
	role Role
	// addr is where it listens; port 0 means any of Config.Ports.
	addr netip.AddrPort
}

// errNoAddress says that proxy ports cannot be anywhere.
var errNoAddress = errors.New("the node has no address of this IP family that portals could lead to: set Config.Listen")

// chooseAddress chooses the address of proxy ports. One that nobody has told stays until
// everything is gone through again.
func (e *Engine) chooseAddress(update *desired.Update) error {
	if addr, known := e.config.listenAddr(e.family, update.Globals.NodeAddresses); known {
		e.at = addr
		return nil
	}
	if !update.Full && e.at.IsValid() {
		return nil
	}
	e.at = netip.Addr{}
	local, err := lightdeps.LocalAddresses(e.config.NetNS)
	if err != nil {
		return err
	}
	for _, addr := range local {
		if addr.Is4() == (e.family == v1.IPv4Protocol) && addr.IsGlobalUnicast() {
			e.at = addr
			return nil
		}
	}
	for range update.Services() {
		return errNoAddress
	}
	return nil
}

// spots are where a service port listens, and how clients are treated there.
func (e *Engine) spots(s *desired.Service) (map[spot]treatment, error) {
	if e.config.Place == PlaceFrontends {
		return e.frontendSpots(s)
	}
	at := netip.AddrPortFrom(e.at, 0)
	spots := map[spot]treatment{}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if e.portals == nil {
			spots[spot{roleOf(f), at}] = treatmentOf(f, &e.globals)
			continue
		}
		if f.Scope == desired.ScopeLocal {
			spots[spot{RoleLocal, at}] = treatment{scope: desired.ScopeLocal, action: desired.Forward}
		}
		if f.Scope == desired.ScopeCluster || f.ShortCircuit {
			spots[spot{RoleCluster, at}] = treatment{scope: desired.ScopeCluster, action: desired.Forward}
		}
	}
	return spots, nil
}

// frontendSpots are the frontends themselves.
func (e *Engine) frontendSpots(s *desired.Service) (map[spot]treatment, error) {
	spots := map[spot]treatment{}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		addrs := []netip.Addr{f.VIP}
		if f.Kind == desired.NodePort {
			var err error
			if addrs, err = e.nodePortAddrs(); err != nil {
				return nil, err
			}
		}
		for _, addr := range addrs {
			spots[spot{roleOf(f), netip.AddrPortFrom(addr, f.Port)}] = treatmentOf(f, &e.globals)
		}
	}
	return spots, nil
}

// nodePortAddrs are the addresses to listen on for node ports: the unspecified one
// stands for all.
func (e *Engine) nodePortAddrs() (addrs []netip.Addr, err error) {
	accepted := e.globals.NodePortAddresses
	if slices.ContainsFunc(accepted, func(p netip.Prefix) bool { return p.Bits() == 0 }) {
		if e.family == v1.IPv4Protocol {
			return []netip.Addr{netip.IPv4Unspecified()}, nil
		}
		return []netip.Addr{netip.IPv6Unspecified()}, nil
	}
	if len(accepted) == 0 {
		return nil, nil
	}
	local, err := lightdeps.LocalAddresses(e.config.NetNS) // others' addresses may be accepted too
	if err != nil {
		return nil, err
	}
	for _, prefix := range accepted {
		if addr := prefix.Addr(); prefix.IsSingleIP() && addr.IsLoopback() { // no interface may list it
			local = append(local, addr)
		}
	}
	return slices.DeleteFunc(local, func(a netip.Addr) bool { return !contains(accepted, a) }), nil
}

// roleOf says which socket of its service port a frontend needs.
func roleOf(f *desired.Frontend) Role {
	switch {
	case f.Kind == desired.ClusterIP:
		return RoleInternal
	case f.Restricted:
		return RoleRestricted
	default:
		return RoleExternal
	}
}
