package desired

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// Minimal returns the prefixes of one family, masked, sorted, and without those that another
// one contains. Invalid prefixes are ignored.
func Minimal(prefixes []netip.Prefix, family v1.IPFamily) []netip.Prefix {
	var all []netip.Prefix
	for _, p := range prefixes {
		if p.IsValid() && p.Addr().Is4() == (family == v1.IPv4Protocol) {
			all = append(all, p.Masked())
		}
	}
	slices.SortFunc(all, comparePrefixes)
	var kept []netip.Prefix
	for _, p := range all {
		if n := len(kept); n == 0 || !kept[n-1].Overlaps(p) {
			kept = append(kept, p)
		}
	}
	return kept
}

func contains(ranges []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(a) })
}

// containsSorted is contains for ranges that are sorted and of which none contains another.
func containsSorted(ranges []netip.Prefix, a netip.Addr) bool {
	i, found := slices.BinarySearchFunc(ranges, a, func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
	return found || i > 0 && ranges[i-1].Contains(a)
}

func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}
