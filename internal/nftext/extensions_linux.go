package nftext

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// extension is what the kernel has of an extension of iptables: one of the structs of
// linux/netfilter/xt_*.h, linux/netfilter_ipv4/ipt_*.h and linux/netfilter_ipv6/ip6t_*.h. Numbers
// are in the byte order of the machine, unless they are of packets.
type extension struct {
	name     string
	revision uint32
	info     []byte
}

func (e *extension) u8(at int) uint8 {
	if at >= len(e.info) {
		return 0
	}
	return e.info[at]
}

func (e *extension) u16(at int) uint16 { return uint16(integers.number(e.bytes(at, 2))) }

func (e *extension) u32(at int) uint32 { return uint32(integers.number(e.bytes(at, 4))) }

// bytes returns zeros for what is missing.
func (e *extension) bytes(at, size int) []byte {
	b := make([]byte, size)
	if at < len(e.info) {
		copy(b, e.info[at:])
	}
	return b
}

// match prints a match of iptables as nft does, which translates those that it knows.
func (p *printer) match(a attributes) {
	p.implied = [len(p.implied)]int{} // by extensions nothing is
	e := extension{a.text(unix.NFTA_MATCH_NAME), a.u32(unix.NFTA_MATCH_REV), a.get(unix.NFTA_MATCH_INFO)}
	text := ""
	switch e.name {
	case "comment":
		p.comment = terminated(e.info)
		return
	case "tcp", "udp":
		if text = e.ports(); text == "" && !slices.ContainsFunc(e.info[min(8, len(e.info)):], func(b byte) bool { return b != 0 }) {
			return // any ports
		}
	case "multiport":
		text = e.manyPorts(p.transport)
	case "conntrack":
		text = e.connection()
	case "mark":
		text = e.mark()
	case "icmp":
		text = e.icmp("icmp type ", icmpTypes)
	case "icmp6":
		text = e.icmp("icmpv6 type ", icmp6Types)
	case "addrtype":
		text = e.addressType()
	case "statistic":
		text = e.statistic()
	}
	if text == "" {
		p.doubt("xt match %s", e.name)
		return
	}
	p.add("%s", text)
}

// terminated returns the text before the first zero.
func terminated(b []byte) string {
	text, _, _ := strings.Cut(string(b), "\x00")
	return text
}

// negation is the operator of a match that is inverted.
func negation(inverted bool) string {
	if inverted {
		return "!= "
	}
	return ""
}

// ports prints struct xt_tcp or xt_udp, if it is only about ports.
func (e *extension) ports() string {
	invertAt := 8
	if e.name == "tcp" {
		if invertAt = 11; e.u8(8) != 0 || e.u8(9) != 0 { // an option or flags
			return ""
		}
	}
	inverted := e.u8(invertAt)
	var texts []string
	for i, field := range []string{" sport ", " dport "} {
		from, to, not := e.u16(4*i), e.u16(4*i+2), negation(inverted&(1<<i) != 0)
		switch {
		case from == 0 && to == 0xffff && not == "":
		case from == to:
			texts = append(texts, fmt.Sprint(e.name, field, not, from))
		default:
			texts = append(texts, fmt.Sprint(e.name, field, not, from, "-", to))
		}
	}
	return strings.Join(texts, " ")
}

// manyPorts prints struct xt_multiport_v1.
func (e *extension) manyPorts(protocol string) string {
	const (
		portsAt, rangesAt, invertAt = 2, 32, 47
		most                        = 15
	)
	side, count := e.u8(0), int(e.u8(1))
	if side > 1 || count > most || e.revision != 1 {
		return ""
	}
	var list []string
	for i := 0; i < count; i++ {
		port := e.u16(portsAt + 2*i)
		text := strconv.Itoa(int(port))
		if e.u8(rangesAt+i) != 0 {
			i++
			text += fmt.Sprintf("-%d", e.u16(portsAt+2*i))
		}
		list = append(list, text)
	}
	text := protocol + [...]string{" sport ", " dport "}[side] + negation(e.u8(invertAt) != 0)
	if len(list) == 1 {
		return text + list[0]
	}
	return text + "{ " + strings.Join(list, ", ") + " }"
}

// connection prints struct xt_conntrack_mtinfo1 to 3, if it is only about the state.
func (e *extension) connection() string {
	const (
		matchAt, invertAt, stateAt = 146, 148, 150
		matchState                 = 1
		asState                    = 1 << 13 // only tells how iptables prints it
		dnat                       = 1 << 7
	)
	mask := e.u16(stateAt)
	if e.revision < 2 {
		mask &= 0xff // a byte there
	}
	if e.u16(matchAt)&^asState != matchState || len(e.info) <= stateAt || e.revision == 0 {
		return ""
	}
	not := ""
	if e.u16(invertAt)&matchState != 0 {
		not = "! "
	}
	if mask == dnat {
		return "ct status " + not + "dnat"
	}
	var list []string
	for _, state := range []struct {
		bit  uint16
		name string
	}{{1, "invalid"}, {8, "new"}, {4, "related"}, {2, "established"}, {1 << 8, "untracked"}} {
		if mask&state.bit != 0 {
			list = append(list, state.name)
			mask &^= state.bit
		}
	}
	if mask != 0 {
		return ""
	}
	return "ct state " + not + strings.Join(list, ",")
}

// mark prints struct xt_mark_mtinfo1.
func (e *extension) mark() string {
	mark, mask, inverted := e.u32(0), e.u32(4), e.u8(8) != 0
	switch {
	case mask == 0xffffffff:
		return fmt.Sprintf("meta mark %s0x%08x", negation(inverted), mark)
	case inverted:
		return fmt.Sprintf("meta mark & 0x%08x != 0x%08x", mask, mark)
	default:
		return fmt.Sprintf("meta mark & 0x%08x == 0x%08x", mask, mark)
	}
}

// icmp prints struct ipt_icmp or ip6t_icmp, if it is about all codes of one type.
func (e *extension) icmp(name string, types *kind) string {
	if e.u8(1) != 0 || e.u8(2) != 0xff || e.u8(0) == 0xff && name == "icmp type " {
		return ""
	}
	return name + negation(e.u8(3)&1 != 0) + types.text(nil, e.bytes(0, 1))
}

// addressType prints struct xt_addrtype_info_v1, if it is about one of the types.
func (e *extension) addressType() string {
	source, destination, flags := e.u16(0), e.u16(2), e.u32(4)
	name, types := "fib daddr type ", destination
	if source != 0 {
		name, types, flags = "fib saddr type ", source, flags<<1
	}
	i := 0
	for types>>i > 1 {
		i++
	}
	if e.revision != 1 || source != 0 && destination != 0 || types != 1<<i || flags&^2 != 0 {
		return ""
	}
	return name + negation(flags&2 != 0) + routeTypes.text(nil, binary.NativeEndian.AppendUint32(nil, uint32(i)))
}

// statistic prints struct xt_statistic_info, if it is about a probability.
func (e *extension) statistic() string {
	if e.u16(0) != 0 {
		return ""
	}
	return fmt.Sprintf("meta random & 2147483647 %s %d", [...]string{"<", ">="}[e.u16(2)&1], e.u32(4))
}

// target prints a target of iptables as nft does.
func (p *printer) target(a attributes) {
	e := extension{a.text(unix.NFTA_TARGET_NAME), a.u32(unix.NFTA_TARGET_REV), a.get(unix.NFTA_TARGET_INFO)}
	text := ""
	switch e.name {
	case "REJECT":
		p.rejects = true
		text = e.reject(p.family)
	case "LOG":
		text = e.log()
	case "MASQUERADE", "REDIRECT", "DNAT", "SNAT":
		text = e.translation(p.family)
	case "MARK":
		text = e.setMark()
	case "CT":
		if e.u16(0)|2 == 3 { // XT_CT_NOTRACK, and XT_CT_NOTRACK_ALIAS
			text = "notrack"
		}
	}
	if text == "" {
		p.doubt("xt target %s", e.name)
		return
	}
	p.add("%s", text)
}

// reject prints struct ipt_reject_info or ip6t_reject_info.
func (e *extension) reject(family byte) string {
	const port, reset = "port-unreachable", "tcp reset"
	with, codes := "icmp type ", []string{"net-unreachable", "host-unreachable", "prot-unreachable", port, "", "net-prohibited", "host-prohibited", reset, "admin-prohibited"}
	if family == unix.NFPROTO_IPV6 {
		with, codes = "icmpv6 type ", []string{"no-route", "admin-prohibited", "", "addr-unreachable", port, "", reset, "policy-fail", "reject-route"}
	}
	n := int(e.u32(0))
	switch {
	case n >= len(codes) || codes[n] == "":
		return ""
	case codes[n] == port:
		return "reject"
	case codes[n] == reset:
		return "reject with tcp reset"
	default:
		return "reject with " + with + codes[n]
	}
}

// log prints struct xt_log_info.
func (e *extension) log() string {
	const prefixAt, prefixSize, usual = 2, 30, 4
	level := e.u8(0)
	if e.u8(1) != 0 || int(level) >= len(logLevels) {
		return ""
	}
	text := "log"
	if prefix := terminated(e.bytes(prefixAt, prefixSize)); prefix != "" {
		text += " prefix " + strconv.Quote(prefix)
	}
	if level != usual {
		text += " level " + logLevels[level]
	}
	return text
}

// setMark prints struct xt_mark_tginfo2: mark = mark & ^mask ^ value.
func (e *extension) setMark() string {
	value, mask := e.u32(0), e.u32(4)
	switch {
	case e.revision != 2:
		return ""
	case mask == 0xffffffff:
		return fmt.Sprintf("meta mark set 0x%x", value)
	case value == 0:
		return fmt.Sprintf("meta mark set mark and 0x%x", ^mask)
	case value == mask:
		return fmt.Sprintf("meta mark set mark or 0x%x", value)
	case mask == 0:
		return fmt.Sprintf("meta mark set mark xor 0x%x", value)
	default:
		return fmt.Sprintf("meta mark set mark and 0x%x xor 0x%x", ^mask, value)
	}
}

// translation prints struct nf_nat_range, nf_nat_range2 or nf_nat_ipv4_multi_range_compat.
func (e *extension) translation(family byte) string {
	const mapsAddresses, mapsPorts = 1, 2
	flagsAt, addressAt, size, portsAt := 0, 4, 16, 36
	if family == unix.NFPROTO_IPV4 {
		if flagsAt, addressAt, size, portsAt = 4, 8, 4, 16; e.name == "DNAT" && e.revision > 0 {
			flagsAt, addressAt, portsAt = 0, 4, 36
		}
	}
	between := 16
	if flagsAt == 4 {
		between = 4
	}
	flags := e.u32(flagsAt)
	to := ""
	if flags&mapsAddresses != 0 {
		to = e.addresses(addressAt, addressAt+between, size, flags&mapsPorts != 0)
	}
	if flags&mapsPorts != 0 {
		from, last := e.bytes(portsAt, 2), e.bytes(portsAt+2, 2)
		if to += ":" + numbers.text(nil, from); !slices.Equal(from, last) {
			to += "-" + numbers.text(nil, last)
		}
	}
	if to != "" {
		to = " to " + to
	}
	if text := natFlags(flags); text != "" {
		to += " " + text
	}
	return strings.ToLower(e.name) + to
}

// addresses prints a range.
func (e *extension) addresses(from, to, size int, withPort bool) string {
	first, _ := netip.AddrFromSlice(e.bytes(from, size))
	last, _ := netip.AddrFromSlice(e.bytes(to, size))
	text := first.String()
	if withPort && first.Is6() {
		text = "[" + text + "]"
	}
	if first == last {
		return text
	}
	return text + "-" + last.String()
}
