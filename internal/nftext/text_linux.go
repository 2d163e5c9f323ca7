package nftext

import (
	"bytes"
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// Rule is the text of a rule.
type Rule struct {
	// Text is what nft list shows, except for the numbers of counters. A part that is not known is the name of
	// its expression, and sets Unknown.
	Text, Comment    string
	Rejects, Unknown bool
}

// Print prints the expressions of a rule: the elements of NFTA_RULE_EXPRESSIONS of linux/netfilter/nf_tables.h. set
// returns a set of its table, nil if it cannot be read, and device the name of an interface, empty if it has none.
func Print(family byte, expressions iter.Seq[[]byte], set func(name string) *Set, device func(index uint32) string) Rule {
	p := printer{family: family, set: set, device: device}
	p.rule(expressions)
	return Rule{p.text(), p.comment, p.rejects, p.unknown}
}

// Numbers of attributes of a verdict.
const (
	verdictCode  = 1 // NFTA_VERDICT_CODE
	verdictChain = 2 // NFTA_VERDICT_CHAIN
)

// VerdictOf names the verdict of NFTA_DATA_VERDICT; empty if there is none.
func VerdictOf(encoded []byte) string {
	v := attributes(encoded)
	if v.get(verdictCode) == nil {
		return ""
	}
	return Verdict(v.u32(verdictCode), v.text(verdictChain))
}

// printer prints a rule as nft list does, except for the numbers of counters. A part that it does
// not know is the name of the expression, and sets unknown.
type printer struct {
	family     byte
	set        func(name string) *Set                     // nil if it cannot be read
	device     func(index uint32) string                  // the name of an interface
	statements []string                                   // those that were taken back are empty
	registers  [unix.NFT_REG32_COUNT]*value               // by the first four bytes
	network    string                                     // protocol that the packet is known to have: "ip", "ip6"
	transport  string                                     // "tcp", "udp", "icmp", …
	implied    [unix.NFT_PAYLOAD_TRANSPORT_HEADER + 1]int // by base: number of the statement that the next field of the protocol implies
	comment    string
	rejects    bool
	unknown    bool
}

// value is what a register has.
type value struct {
	text string
	kind *kind
	size int
	// data is that of a constant. mask is set after "value & mask".
	data, mask []byte
	swapped    bool     // the byte order is not that of kind
	fields     []*value // of a value that is several fields
}

// rule prints the expressions of a rule.
func (p *printer) rule(expressions iter.Seq[[]byte]) {
	p.network = map[byte]string{unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6"}[p.family]
	for e := range expressions {
		p.expression(e)
	}
}

func (p *printer) text() string {
	return strings.Join(slices.DeleteFunc(slices.Clone(p.statements), func(s string) bool { return s == "" }), " ")
}

// expression prints one expression, or sets a register.
func (p *printer) expression(encoded []byte) {
	name := netlinkx.String(netlinkx.Find(encoded, unix.NFTA_EXPR_NAME))
	data := attributes(netlinkx.Find(encoded, unix.NFTA_EXPR_DATA))
	if matches := matchings(name); matches != nil {
		matches(p, data)
		return
	}
	if act := actions(name); act != nil {
		act(p, data)
	} else {
		p.doubt("%s", name)
	}
	p.implied = [len(p.implied)]int{} // what comes after an action implies nothing before it
}

// attributes are those of an expression.
type attributes []byte

// get returns the value of an attribute; nil if it is missing.
func (a attributes) get(typ uint16) []byte { return netlinkx.Find(a, typ) }

// number returns a number in network byte order; 0 if it is missing.
func (a attributes) number(typ uint16) uint64 {
	var n uint64
	for _, b := range a.get(typ) {
		n = n<<8 | uint64(b)
	}
	return n
}

func (a attributes) u32(typ uint16) uint32 { return uint32(a.number(typ)) }

func (a attributes) text(typ uint16) string { return netlinkx.String(a.get(typ)) }

// data is the content of a value.
func (a attributes) data(typ uint16) []byte { return netlinkx.Find(a.get(typ), unix.NFTA_DATA_VALUE) }

func (p *printer) add(format string, args ...any) {
	p.statements = append(p.statements, fmt.Sprintf(format, args...))
}

// doubt adds a part of which only the name is known.
func (p *printer) doubt(format string, args ...any) {
	p.unknown = true
	p.add(format, args...)
}

// key returns the index of a register: one of 16 bytes is the first of four.
func key(register uint32) uint32 {
	if register < unix.NFT_REG32_00 {
		return (register - 1) * 4
	}
	return register - unix.NFT_REG32_00
}

// at returns what a register has, by its key.
func (p *printer) at(key uint32) *value {
	if key < uint32(len(p.registers)) && p.registers[key] != nil {
		return p.registers[key]
	}
	p.unknown = true
	return &value{kind: numbers, text: "?"}
}

func (p *printer) get(register uint32) *value { return p.at(key(register)) }

func (p *printer) put(register uint32, v *value) {
	if at := key(register); at < uint32(len(p.registers)) {
		p.registers[at] = v
	}
}

// imply marks the last statement as one that a field of a protocol implies.
func (p *printer) imply(base uint32) { p.implied[base] = len(p.statements) }

// removeImplied removes the statement that a field of this base implies.
func (p *printer) removeImplied(base uint32) {
	if n := p.implied[base]; n > 0 {
		p.statements[n-1] = ""
	}
	p.implied[base] = 0
}

// compare prints a comparison of a register with a constant.
func (p *printer) compare(a attributes) {
	v, op, data := p.get(a.u32(unix.NFTA_CMP_SREG)), a.u32(unix.NFTA_CMP_OP), a.data(unix.NFTA_CMP_DATA)
	if last := len(p.statements) - 1; op == unix.NFT_CMP_LTE && last >= 0 { // a range is two comparisons
		if from, ok := strings.CutPrefix(p.statements[last], v.text+" >= "); ok {
			p.statements[last] = v.text + " " + from + "-" + v.print(p, data)
			return
		}
	}
	if len(v.fields) > 0 && op == unix.NFT_CMP_EQ && v.mask == nil && len(data) == v.size {
		for _, f := range v.fields {
			p.add("%s %s", f.text, f.print(p, data[:f.size]))
			data = data[f.size:]
		}
		return
	}
	text := p.compared(v, op, data)
	p.add("%s", text)
	if op == unix.NFT_CMP_EQ {
		p.learn(v, v.print(p, data))
	}
}

// compared returns the text of a comparison.
func (p *printer) compared(v *value, op uint32, data []byte) string {
	operators := [...]string{unix.NFT_CMP_NEQ: "!= ", unix.NFT_CMP_LT: "< ", unix.NFT_CMP_LTE: "<= ", unix.NFT_CMP_GT: "> ", unix.NFT_CMP_GTE: ">= "}
	operator := operators[op%uint32(len(operators))]
	text, zero := v.print(p, data), len(bytes.Trim(data, "\x00")) == 0
	switch {
	case v.mask == nil:
	case v.kind.flags && zero: // one of the flags, or none of them
		text = v.print(p, v.mask)
		operator = map[bool]string{true: "", false: "! "}[op == unix.NFT_CMP_NEQ]
	case v.kind == tcpFlagKind:
		text += " / " + v.print(p, v.mask)
	case v.kind.prefix:
		text = fmt.Sprintf("%s/%d", text, ones(v.mask))
	default:
		return fmt.Sprintf("%s & %s %s%s", v.text, v.print(p, v.mask), cmp.Or(operator, "== "), text)
	}
	return v.text + " " + operator + text
}

// learn takes over which protocol a comparison tells.
func (p *printer) learn(v *value, text string) {
	switch v.text {
	case "meta iiftype":
		p.imply(unix.NFT_PAYLOAD_LL_HEADER)
	case "meta nfproto":
		p.network = map[string]string{"ipv4": "ip", "ipv6": "ip6"}[text]
		p.imply(unix.NFT_PAYLOAD_NETWORK_HEADER)
	case "meta l4proto":
		p.transport = text
		p.imply(unix.NFT_PAYLOAD_TRANSPORT_HEADER)
	case "ip protocol", "ip6 nexthdr":
		p.transport = text
		if p.family != unix.NFPROTO_INET {
			p.imply(unix.NFT_PAYLOAD_TRANSPORT_HEADER)
		}
	}
}

// between prints a comparison of a register with two constants.
func (p *printer) between(a attributes) {
	v := p.get(a.u32(unix.NFTA_RANGE_SREG))
	from, to := a.data(unix.NFTA_RANGE_FROM_DATA), a.data(unix.NFTA_RANGE_TO_DATA)
	not := ""
	if a.u32(unix.NFTA_RANGE_OP) == unix.NFT_RANGE_NEQ {
		not = "!= "
	}
	p.add("%s %s%s", v.text, not, v.print(p, from)+"-"+v.print(p, to))
}

// mask changes the value of a register to that after "&" and "^".
func (p *printer) mask(a attributes) {
	v := *p.get(a.u32(unix.NFTA_BITWISE_SREG))
	mask, xor := a.data(unix.NFTA_BITWISE_MASK), a.data(unix.NFTA_BITWISE_XOR)
	switch {
	case len(xor) != len(mask): // a shift
		p.unknown = true
	case len(bytes.Trim(xor, "\x00")) > 0:
		v.text += p.changes(&v, mask, xor)
	default:
		if part := parts[partOf{v.text, string(mask)}]; part.text != "" {
			v.text, v.kind = part.text, part.kind
		} else {
			v.mask = mask
		}
	}
	p.put(a.u32(unix.NFTA_BITWISE_DREG), &v)
}

// changes prints (v & mask) ^ xor in terms of and, xor and or: what mask clears and xor sets is or.
func (p *printer) changes(v *value, mask, xor []byte) (text string) {
	and, or, flip := slices.Clone(mask), slices.Clone(xor), slices.Clone(xor)
	kept := true
	for i := range mask {
		or[i] &^= mask[i]
		flip[i] &= mask[i]
		and[i] |= or[i]
		kept = kept && and[i] == 0xff
	}
	if !kept {
		text += " & " + v.print(p, and)
	}
	for _, change := range []struct {
		operator string
		bits     []byte
	}{{" ^ ", flip}, {" | ", or}} {
		if len(bytes.Trim(change.bits, "\x00")) > 0 {
			text += change.operator + v.print(p, change.bits)
		}
	}
	return text
}

// assigned returns the text of a value that is assigned to another kind.
func (p *printer) assigned(register uint32, to *kind) string {
	v := *p.get(register)
	if v.data != nil {
		return to.text(p, v.data)
	}
	return v.whole(p)
}

// whole is the text with the mask.
func (v *value) whole(p *printer) string {
	if v.mask == nil {
		return v.text
	}
	return v.text + " & " + v.print(p, v.mask)
}

func (v *value) print(p *printer, data []byte) string {
	if v.swapped {
		data = reversed(data)
	}
	return v.kind.text(p, data)
}

// ones counts the first bits of a mask that are set.
func ones(mask []byte) (n int) {
	for _, b := range mask {
		for ; b&0x80 != 0; b <<= 1 {
			n++
		}
	}
	return n
}

// immediate prints the end of a rule, or sets a register to a constant.
func (p *printer) immediate(a attributes) {
	data := a.get(unix.NFTA_IMMEDIATE_DATA)
	if verdict := netlinkx.Find(data, unix.NFTA_DATA_VERDICT); verdict != nil {
		p.add("%s", VerdictOf(verdict))
		return
	}
	content := a.data(unix.NFTA_IMMEDIATE_DATA)
	p.put(a.u32(unix.NFTA_IMMEDIATE_DREG), &value{text: hexadecimal(content), data: content, kind: numbers, size: len(content)})
}
