package changetracker

import (
	"math"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	netutils "k8s.io/utils/net"
)

// The families, as indexes of a perFamily value.
const (
	ipv4 = iota
	ipv6
)

// perFamily holds one value for IPv4 and one for IPv6.
type perFamily[T any] [2]T

// familyIndex returns the index of a family; ok is false for a value that is no IP family.
func familyIndex(family v1.IPFamily) (index int, ok bool) {
	switch family {
	case v1.IPv4Protocol:
		return ipv4, true
	case v1.IPv6Protocol:
		return ipv6, true
	case v1.IPFamilyUnknown:
		return 0, false
	default:
		return 0, false
	}
}

func familyName(index int) v1.IPFamily {
	if index == ipv4 {
		return v1.IPv4Protocol
	}
	return v1.IPv6Protocol
}

func addrFamily(a netip.Addr) int {
	if a.Is4() {
		return ipv4
	}
	return ipv6
}

// ParseAddr parses an address as leniently as the API server. Old objects have leading zeros, which
// are decimal, and padding, which only the slow, sloppy parser accepts, so it comes second. An
// IPv4-mapped address becomes the IPv4 address.
func ParseAddr(text string) (a netip.Addr, ok bool) {
	a, err := netip.ParseAddr(text)
	if err != nil {
		a, ok = netip.AddrFromSlice(netutils.ParseIPSloppy(strings.TrimSpace(text)))
		return a.Unmap(), ok
	}
	return a.Unmap(), true
}

// ParsePrefix is ParseAddr for a CIDR. The result is masked.
func ParsePrefix(text string) (p netip.Prefix, ok bool) {
	text = strings.TrimSpace(text)
	p, err := netip.ParsePrefix(text)
	if err != nil {
		_, network, err := netutils.ParseCIDRSloppy(text)
		if err != nil {
			return netip.Prefix{}, false
		}
		addr, _ := netip.AddrFromSlice(network.IP)
		ones, _ := network.Mask.Size()
		p = netip.PrefixFrom(addr, ones)
	}
	return canonicalPrefix(p), true
}

// ParseRange is ParsePrefix that also accepts an address, as a range of one address.
func ParseRange(text string) (p netip.Prefix, ok bool) {
	if strings.Contains(text, "/") {
		return ParsePrefix(text)
	}
	a, ok := ParseAddr(text)
	if !ok || a.Zone() != "" {
		return p, false
	}
	return netip.PrefixFrom(a, a.BitLen()), true
}

// mappedBits is how many bits longer a prefix is in its IPv4-mapped IPv6 form (RFC 4291,
// 2.5.5.2).
const mappedBits = 96

func canonicalPrefix(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= mappedBits {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-mappedBits)
	}
	return p.Masked()
}

// dialable reports whether clients can connect to the address at all. A zone has a meaning only
// on the node that wrote it.
func dialable(a netip.Addr) bool {
	return a.IsValid() && a.Zone() == "" && !a.IsUnspecified() && !a.IsMulticast()
}

// servable reports whether clients of all nodes may reach a Service at the address (TRK-18). One at a
// loopback or link-local address would take what programs of the node serve to themselves, such as a
// load balancer for the API server, or a cloud's metadata.
func servable(a netip.Addr) bool { return dialable(a) && !special(a) && a != broadcast }

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255}) // read-only

// special reports whether the address means a different machine on each node, or the node itself.
func special(a netip.Addr) bool { return a.IsLoopback() || a.IsLinkLocalUnicast() }

// canonicalAddrs sorts a list in place and drops duplicates. It returns nil for an empty list.
func canonicalAddrs(list []netip.Addr) []netip.Addr {
	if len(list) == 0 {
		return nil
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

// canonicalPrefixes sorts a list in place and drops prefixes that another one contains. A /0
// restricts nothing, like the empty list: the result is nil for both.
func canonicalPrefixes(list []netip.Prefix) []netip.Prefix {
	slices.SortFunc(list, netip.Prefix.Compare)
	kept := list[:0]
	for _, p := range list {
		if p.Bits() == 0 {
			return nil
		}
		// A prefix sorts directly before the prefixes that it contains.
		if n := len(kept); n > 0 && kept[n-1].Overlaps(p) {
			continue
		}
		kept = append(kept, p)
	}
	if len(kept) == 0 {
		return nil
	}
	return kept
}

// canonicalNames returns the sorted list without duplicates. It does not change the input, and
// returns it if it is canonical already.
func canonicalNames(list []string) []string {
	if len(list) == 0 {
		return nil
	}
	for i := range list[1:] {
		if list[i] >= list[i+1] {
			list = slices.Clone(list)
			slices.Sort(list)
			return slices.Compact(list)
		}
	}
	return list
}

func familyOf(a netip.Addr) v1.IPFamily {
	if a.Is4() {
		return v1.IPv4Protocol
	}
	return v1.IPv6Protocol
}

func unmap(list []netip.Addr) {
	for i, a := range list {
		list[i] = a.Unmap()
	}
}

// portNumber converts an API port. 0 is valid and means that there is no port.
func portNumber(number int32) (port uint16, ok bool) {
	if number < 0 || number > math.MaxUint16 {
		return 0, false
	}
	return uint16(number), true
}
