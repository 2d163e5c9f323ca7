package main

import (
	"fmt"
	"net/netip"
	"slices"

	gw "sigs.k8s.io/gateway-api/apis/v1"
)

// pool hands out the addresses of Gateways. Each address belongs to one Gateway.
type pool struct {
	prefixes []netip.Prefix
	used     map[netip.Addr]bool
}

// fault is why a Gateway does not get its addresses.
type fault struct {
	reason  gw.GatewayConditionReason
	message string
}

// assign returns the addresses of a Gateway: what it asks for, and otherwise one of each
// family of the pool, if possible the same as before. Only addresses of the pool may be asked
// for: whoever may create a Gateway could otherwise take the address of any other service.
func (p *pool) assign(g *gw.Gateway) (addrs []netip.Addr, f *fault) {
	for _, want := range g.Spec.Addresses {
		if want.Value == "" {
			continue // any address
		}
		addr, err := netip.ParseAddr(want.Value)
		if err != nil || !p.free(addr) || slices.Contains(addrs, addr) {
			f = &fault{gw.GatewayReasonAddressNotUsable, want.Value + " belongs to another Gateway, or is not in this gateway's pool"}
			continue
		}
		addrs = append(addrs, addr)
	}
	if f == nil && len(addrs) == 0 {
		addrs, f = p.choose(g)
	}
	for _, addr := range addrs {
		p.used[addr] = true
	}
	return addrs, f
}

// choose returns a free address of each family of the pool.
func (p *pool) choose(g *gw.Gateway) (addrs []netip.Addr, f *fault) {
	for _, family := range families() {
		var candidates []netip.Prefix
		for _, had := range g.Status.Addresses {
			if addr, err := netip.ParseAddr(had.Value); err == nil && familyOf(addr) == family {
				candidates = append(candidates, netip.PrefixFrom(addr, addr.BitLen()))
			}
		}
		for _, prefix := range p.prefixes {
			if familyOf(prefix.Addr()) == family {
				candidates = append(candidates, prefix)
			}
		}
		if addr, ok := p.first(candidates); ok {
			addrs = append(addrs, addr)
		}
	}
	if len(addrs) == 0 {
		f = &fault{gw.GatewayReasonAddressNotAssigned, fmt.Sprintf("no address of %v is free", p.prefixes)}
	}
	return addrs, f
}

// first returns the first free address that is not the network's.
func (p *pool) first(prefixes []netip.Prefix) (netip.Addr, bool) {
	for _, prefix := range prefixes {
		for addr := prefix.Masked().Addr(); prefix.Contains(addr); addr = addr.Next() {
			if p.free(addr) && !isNetworks(prefix, addr) {
				return addr, true
			}
		}
	}
	return netip.Addr{}, false
}

// isNetworks reports whether an address is the network itself or its broadcast address (IPv4), or the anycast
// address of its routers (IPv6, RFC 4291, 2.6.1). Two addresses or one make no network (RFC 3021, RFC 6164).
func isNetworks(prefix netip.Prefix, addr netip.Addr) bool {
	if prefix.Bits() >= addr.BitLen()-1 {
		return false
	}
	return addr == prefix.Masked().Addr() || addr.Is4() && !prefix.Contains(addr.Next())
}

func (p *pool) free(addr netip.Addr) bool {
	return !p.used[addr] && slices.ContainsFunc(p.prefixes, func(own netip.Prefix) bool { return own.Contains(addr) })
}

// unsupported returns the type of a requested address that is not an IP address, or nothing.
func unsupported(g *gw.Gateway) gw.AddressType {
	for _, a := range g.Spec.Addresses {
		if t := deref(a.Type, gw.IPAddressType); t != gw.IPAddressType {
			return t
		}
	}
	return ""
}
