package nftext

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

type printing func(p *printer, a attributes)

// namedPrinting prints the expression of a name. They are in lists, which cost no memory, as maps would: a plan
// prints hundreds of expressions.
type namedPrinting struct {
	name  string
	print printing
}

func find(name string, among []namedPrinting) printing {
	for i := range among {
		if among[i].name == name {
			return among[i].print
		}
	}
	return nil
}

// matchings are the expressions that load registers, and those that compare them.
func matchings(name string) printing {
	return find(name, []namedPrinting{
		{"meta", (*printer).meta},
		{"payload", (*printer).payload},
		{"cmp", (*printer).compare},
		{"lookup", (*printer).lookup},
		{"immediate", (*printer).immediate},
		{"bitwise", (*printer).mask},
		{"byteorder", (*printer).swap},
		{"ct", (*printer).connection},
		{"exthdr", (*printer).option},
		{"fib", (*printer).fib},
		{"hash", (*printer).hash},
		{"match", (*printer).match},
		{"numgen", (*printer).random},
		{"range", (*printer).between},
		{"rt", (*printer).route},
	})
}

// actions are the other expressions.
func actions(name string) printing {
	return find(name, []namedPrinting{
		{"counter", func(p *printer, _ attributes) { p.add("counter") }},
		{"dynset", (*printer).update},
		{"nat", (*printer).nat},
		{"masq", (*printer).masquerade},
		{"reject", (*printer).reject},
		{"flow_offload", func(p *printer, a attributes) { p.add("flow add @%s", a.text(1)) }}, // NFTA_FLOW_TABLE_NAME
		{"connlimit", (*printer).connlimit},
		{"limit", (*printer).limit},
		{"log", (*printer).log},
		{"notrack", func(p *printer, _ attributes) { p.add("notrack") }},
		{"objref", (*printer).object},
		{"quota", (*printer).quota},
		{"redir", (*printer).redirect},
		{"target", (*printer).target},
	})
}

// swap changes the byte order of a register.
func (p *printer) swap(a attributes) {
	v := *p.get(a.u32(unix.NFTA_BYTEORDER_SREG))
	v.swapped = v.kind.host && isLittleEndian
	p.put(a.u32(unix.NFTA_BYTEORDER_DREG), &v)
}

// route loads something of the packet's route.
func (p *printer) route(a attributes) {
	const maxSegmentSize = 3 // NFT_RT_TCPMSS
	text := "rt mtu"
	if n := a.u32(unix.NFTA_RT_KEY); n != maxSegmentSize {
		p.unknown = true
		text = fmt.Sprintf("rt key %d", n)
	}
	p.put(a.u32(unix.NFTA_RT_DREG), &value{text: text, kind: numbers, size: 2})
}

// option loads or sets one of the TCP header.
func (p *printer) option(a attributes) {
	const (
		operationTCP = 1 // NFT_EXTHDR_OP_TCPOPT
		segmentSize  = 2 // TCPOPT_MAXSEG
	)
	text := "tcp option maxseg size"
	if a.u32(unix.NFTA_EXTHDR_OP) != operationTCP || a.number(unix.NFTA_EXTHDR_TYPE) != segmentSize || a.u32(unix.NFTA_EXTHDR_OFFSET) != 2 {
		p.unknown = true
		text = fmt.Sprintf("exthdr %d", a.number(unix.NFTA_EXTHDR_TYPE))
	}
	if a.get(unix.NFTA_EXTHDR_SREG) != nil {
		p.add("%s set %s", text, p.assigned(a.u32(unix.NFTA_EXTHDR_SREG), numbers))
		return
	}
	p.removeImplied(unix.NFT_PAYLOAD_TRANSPORT_HEADER)
	p.put(a.u32(unix.NFTA_EXTHDR_DREG), &value{text: text, kind: numbers, size: 2})
}

// over is the flag of limits that match what is above them.
const over = 1

func overText(flags uint32) string {
	if flags&over != 0 {
		return "over "
	}
	return ""
}

func (p *printer) connlimit(a attributes) {
	p.add("ct count %s%d", overText(a.u32(2)), a.u32(1)) // NFTA_CONNLIMIT_FLAGS, NFTA_CONNLIMIT_COUNT
}

func (p *printer) limit(a attributes) {
	const usualBurst, ofBytes = 5, 1
	unit := map[uint64]string{1: "second", 60: "minute", 60 * 60: "hour", 24 * 60 * 60: "day", 7 * 24 * 60 * 60: "week"}[a.number(unix.NFTA_LIMIT_UNIT)]
	text := "limit rate " + overText(a.u32(unix.NFTA_LIMIT_FLAGS))
	burst := a.u32(unix.NFTA_LIMIT_BURST)
	if a.u32(unix.NFTA_LIMIT_TYPE) == ofBytes {
		text += byteText(a.number(unix.NFTA_LIMIT_RATE)) + "/" + unit
		if burst > 0 {
			text += " burst " + byteText(uint64(burst))
		}
	} else {
		text += fmt.Sprintf("%d/%s", a.number(unix.NFTA_LIMIT_RATE), unit)
		if burst > 0 && burst != usualBurst {
			text += fmt.Sprintf(" burst %d packets", burst)
		}
	}
	p.add("%s", text)
}

// byteText prints a number of bytes in the greatest unit that divides it.
func byteText(n uint64) string {
	const kilo = 1 << 10
	for _, unit := range []string{"bytes", "kbytes"} {
		if n == 0 || n%kilo != 0 {
			return fmt.Sprintf("%d %s", n, unit)
		}
		n /= kilo
	}
	return fmt.Sprintf("%d mbytes", n)
}

func (p *printer) quota(a attributes) {
	p.add("quota %s%s", overText(a.u32(unix.NFTA_QUOTA_FLAGS)), byteText(a.number(unix.NFTA_QUOTA_BYTES)))
}

// object refers to an object of the table.
func (p *printer) object(a attributes) {
	name := map[uint32]string{1: "counter name", 2: "quota name", 3: "ct helper set", 4: "limit name"}[a.u32(unix.NFTA_OBJREF_IMM_TYPE)]
	if name == "" || a.get(unix.NFTA_OBJREF_IMM_NAME) == nil {
		p.doubt("objref")
		return
	}
	p.add("%s %q", name, a.text(unix.NFTA_OBJREF_IMM_NAME))
}

var logLevels = []string{"emerg", "alert", "crit", "err", "warn", "notice", "info", "debug", "audit"} // read-only

func (p *printer) log(a attributes) {
	const usualLevel = 4
	words := []string{"log"}
	if a.get(unix.NFTA_LOG_PREFIX) != nil {
		words = append(words, "prefix", strconv.Quote(a.text(unix.NFTA_LOG_PREFIX)))
	}
	for _, n := range []struct {
		name string
		at   uint16
	}{{"group", unix.NFTA_LOG_GROUP}, {"snaplen", unix.NFTA_LOG_SNAPLEN}, {"queue-threshold", unix.NFTA_LOG_QTHRESHOLD}} {
		if a.get(n.at) != nil && (n.at == unix.NFTA_LOG_GROUP || a.number(n.at) > 0) {
			words = append(words, n.name, fmt.Sprint(a.number(n.at)))
		}
	}
	if level := a.u32(unix.NFTA_LOG_LEVEL); a.get(unix.NFTA_LOG_LEVEL) != nil && level != usualLevel && int(level) < len(logLevels) {
		words = append(words, "level", logLevels[level])
	}
	p.unknown = p.unknown || a.u32(unix.NFTA_LOG_FLAGS) != 0
	p.add("%s", strings.Join(words, " "))
}

func (p *printer) reject(a attributes) {
	const portUnreachable = "port-unreachable"
	p.rejects = true
	with, codes := "icmpx", icmpxCodes
	switch a.u32(unix.NFTA_REJECT_TYPE) {
	case unix.NFT_REJECT_TCP_RST:
		if p.family != unix.NFPROTO_INET {
			p.removeImplied(unix.NFT_PAYLOAD_TRANSPORT_HEADER)
		}
		p.add("reject with tcp reset")
		return
	case unix.NFT_REJECT_ICMP_UNREACH:
		if with, codes = "icmp", icmpCodes; p.network == "ip6" {
			with, codes = "icmpv6", icmp6Codes
		}
	}
	text := codes.text(p, a.get(unix.NFTA_REJECT_ICMP_CODE))
	if p.family == unix.NFPROTO_INET && with != "icmpx" {
		p.removeImplied(unix.NFT_PAYLOAD_NETWORK_HEADER)
		p.add("reject with %s %s", with, text)
		return
	}
	if text == portUnreachable {
		p.add("reject")
		return
	}
	p.add("reject with %s %s", with, text)
}

// natFlags prints the flags of a translation.
func natFlags(flags uint32) (text string) {
	for _, f := range []struct {
		bit  uint32
		name string
	}{{unix.NF_NAT_RANGE_PROTO_RANDOM, "random"}, {unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY, "fully-random"}, {unix.NF_NAT_RANGE_PERSISTENT, "persistent"}} {
		if flags&f.bit != 0 {
			if text != "" {
				text += ","
			}
			text += f.name
		}
	}
	return text
}

// translation prints a name with what belongs to it.
func (p *printer) translation(name, to string, flags uint32) {
	text := name
	if to != "" {
		text += " to " + to
	}
	if flags := natFlags(flags); flags != "" {
		text += " " + flags
	}
	p.add("%s", text)
}

func (p *printer) masquerade(a attributes) {
	p.translation("masquerade", p.toPorts(a, unix.NFTA_MASQ_REG_PROTO_MIN, unix.NFTA_MASQ_REG_PROTO_MAX), a.u32(unix.NFTA_MASQ_FLAGS))
}

func (p *printer) redirect(a attributes) {
	p.translation("redirect", p.toPorts(a, unix.NFTA_REDIR_REG_PROTO_MIN, unix.NFTA_REDIR_REG_PROTO_MAX), a.u32(unix.NFTA_REDIR_FLAGS))
}

func (p *printer) nat(a attributes) {
	name := [...]string{"snat", "dnat"}[a.u32(unix.NFTA_NAT_TYPE)&1]
	if p.family == unix.NFPROTO_INET {
		name += map[uint32]string{unix.NFPROTO_IPV4: " ip", unix.NFPROTO_IPV6: " ip6"}[a.u32(unix.NFTA_NAT_FAMILY)]
	}
	kind := address4
	if a.u32(unix.NFTA_NAT_FAMILY) == unix.NFPROTO_IPV6 {
		kind = address6
	}
	if a.get(unix.NFTA_NAT_REG_ADDR_MIN) != nil && p.get(a.u32(unix.NFTA_NAT_REG_ADDR_MIN)).data == nil { // of a map, which has the ports too
		if a.get(unix.NFTA_NAT_REG_PROTO_MIN) != nil && p.family != unix.NFPROTO_INET {
			name += " " + Family(byte(a.u32(unix.NFTA_NAT_FAMILY)))
		}
		p.translation(name, p.assigned(a.u32(unix.NFTA_NAT_REG_ADDR_MIN), kind), a.u32(unix.NFTA_NAT_FLAGS))
		return
	}
	to := p.span(a, unix.NFTA_NAT_REG_ADDR_MIN, unix.NFTA_NAT_REG_ADDR_MAX, kind)
	ports := p.toPorts(a, unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX)
	if _, err := netip.ParseAddr(to); err == nil && ports != "" && kind == address6 {
		to = "[" + to + "]"
	}
	p.translation(name, to+ports, a.u32(unix.NFTA_NAT_FLAGS))
}

// toPorts prints the ports of a translation.
func (p *printer) toPorts(a attributes, from, to uint16) string {
	if text := p.span(a, from, to, numbers); text != "" {
		return ":" + text
	}
	return ""
}

// span prints a range between two registers, which may be one.
func (p *printer) span(a attributes, from, to uint16, k *kind) string {
	if a.get(from) == nil {
		return ""
	}
	first := p.assigned(a.u32(from), k)
	if a.get(to) == nil || a.u32(to) == a.u32(from) || p.assigned(a.u32(to), k) == first {
		return first
	}
	return first + "-" + p.assigned(a.u32(to), k)
}

// dynsetExpressions is NFTA_DYNSET_EXPRESSIONS of linux/netfilter/nf_tables.h: there are several.
const dynsetExpressions = 10

// update changes an element of a set.
func (p *printer) update(a attributes) {
	name := a.text(unix.NFTA_DYNSET_SET_NAME)
	s := p.set(name)
	parts := []string{p.textOf(p.keys(a.u32(unix.NFTA_DYNSET_SREG_KEY), s))}
	if ms := a.number(unix.NFTA_DYNSET_TIMEOUT); ms > 0 {
		parts = append(parts, "timeout "+duration(ms))
	}
	inner := printer{family: p.family, set: p.set, device: p.device}
	for typ, content := range netlinkx.Attributes(a) {
		switch typ {
		case unix.NFTA_DYNSET_EXPR:
			inner.expression(content)
		case dynsetExpressions:
			for e := range netlinkx.Values(content) {
				inner.expression(e)
			}
		}
	}
	if text := inner.text(); text != "" {
		parts = append(parts, text)
	}
	if a.get(unix.NFTA_DYNSET_SREG_DATA) != nil {
		data := p.get(a.u32(unix.NFTA_DYNSET_SREG_DATA))
		p.unknown = p.unknown || data.data != nil // of a kind that the set knows
		parts = append(parts, ": "+data.whole(p))
	}
	p.unknown = p.unknown || inner.unknown || s == nil
	operation := [...]string{"add", "update", "delete"}[a.u32(unix.NFTA_DYNSET_OP)%3]
	p.add("%s @%s { %s }", operation, name, strings.Join(parts, " "))
}

// duration prints milliseconds like nft.
func duration(ms uint64) (text string) {
	for _, unit := range []struct {
		name string
		ms   uint64
	}{{"d", 24 * 3600 * 1000}, {"h", 3600 * 1000}, {"m", 60 * 1000}, {"s", 1000}, {"ms", 1}} {
		if n := ms / unit.ms; n > 0 {
			text += fmt.Sprintf("%d%s", n, unit.name)
			ms -= n * unit.ms
		}
	}
	return text
}
