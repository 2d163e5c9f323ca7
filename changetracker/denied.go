package changetracker

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// denySources brings the DeniedSources into canonical form, and takes them out of the LoadBalancerSourceRanges. It denies
// all sources if no range remains, or more than each of so many ports of a Service may have: see maxSources.
func (p *ServicePort) denySources(ports int) {
	everybody := func(r netip.Prefix) bool { return r.Bits() == 0 }
	vips := max(len(p.LoadBalancerVIPs), 1)
	most := maxSources/max(ports, 1)/vips - vips // the VIPs may be admitted too
	if n := len(p.DeniedSources); n > max(most, 0) || slices.ContainsFunc(p.DeniedSources, everybody) {
		p.DenyAllSources, p.DeniedSources = true, nil
	}
	if p.DeniedSources = canonicalPrefixes(p.DeniedSources); len(p.DeniedSources) == 0 || p.DenyAllSources {
		return
	}
	admitted := p.LoadBalancerSourceRanges
	if len(admitted) == 0 {
		admitted = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0)}
		if p.Family == v1.IPv6Protocol {
			admitted[0] = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
	}
	var left []netip.Prefix
	for _, r := range admitted {
		left = appendWithout(left, r, p.DeniedSources, most)
	}
	if p.DenyAllSources = len(left) == 0 || len(left) > most; p.DenyAllSources {
		left = nil
	}
	p.LoadBalancerSourceRanges = left
}

// appendWithout appends the ranges that remain of r, in order, until there are more than most.
func appendWithout(list []netip.Prefix, r netip.Prefix, denied []netip.Prefix, most int) []netip.Prefix {
	// They are sorted, and none overlaps another: only the last one that does not begin after r may contain r.
	i, _ := slices.BinarySearchFunc(denied, r.Addr(), func(d netip.Prefix, a netip.Addr) int { return d.Addr().Compare(a) })
	if i > 0 && denied[i-1].Overlaps(r) {
		i--
	}
	switch {
	case i == len(denied) || !denied[i].Overlaps(r):
		return append(list, r)
	case denied[i].Bits() <= r.Bits() || len(list) > most:
		return list
	default:
		for _, half := range halves(r) {
			list = appendWithout(list, half, denied[i:], most)
		}
		return list
	}
}

// halves returns the halves of a range with more than one address.
func halves(r netip.Prefix) [2]netip.Prefix {
	upper, bit := r.Addr().AsSlice(), r.Bits()
	upper[bit/8] |= 0x80 >> (bit % 8)
	second, _ := netip.AddrFromSlice(upper)
	return [2]netip.Prefix{netip.PrefixFrom(r.Addr(), bit+1), netip.PrefixFrom(second, bit+1)}
}
