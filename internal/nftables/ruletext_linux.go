package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
)

// String prints a rule as nft does. Expressions pass values through registers; the
// printer keeps the text of the value in each of them.
func (r rule) String() string {
	p := printer{}
	for _, e := range r {
		p.expression(e)
	}
	return strings.Join(p.statements, " ")
}

type printer struct {
	statements []string
	registers  [20]value
}

// value is the content of registers, from the one that holds its first bytes on.
type value struct {
	text      string
	registers int                 // that it fills
	constant  func([]byte) string // prints what the value is compared or combined with
	isAddress bool
	isFlag    bool
	bits      int    // of the prefix that an address is compared with
	immediate []byte // instead of a text
}

func (p *printer) at(register uint32) *value { return &p.registers[register-reg(0)] }

func (p *printer) statement(format string, args ...any) {
	p.statements = append(p.statements, fmt.Sprintf(format, args...))
}

func (p *printer) expression(e expr.Any) {
	switch e := e.(type) {
	case *expr.Meta:
		p.meta(e)
	case *expr.Bitwise:
		*p.at(e.DestRegister) = p.at(e.SourceRegister).combined(e)
	case *expr.Cmp:
		p.statements = append(p.statements, p.at(e.Register).compared(e))
	case *expr.Lookup:
		p.lookup(e)
	case *expr.Dynset:
		p.dynset(e)
	case *expr.NAT:
		p.statement("dnat %s to %s", either(e.Family == unix.NFPROTO_IPV6, "ip6", "ip"), p.at(e.RegAddrMin).text)
	case *expr.Masq:
		p.statement("masquerade fully-random")
	case *expr.Reject:
		if e.Type == unix.NFT_REJECT_TCP_RST { // nft does not print that it is for TCP
			p.statements[len(p.statements)-1] = "reject with tcp reset"
			break
		}
		p.statement("reject")
	case *expr.Verdict:
		p.statement("%s", verdictText(e))
	case *expr.FlowOffload:
		p.statement("flow add @%s", strings.TrimRight(e.Name, "\x00"))
	default:
		p.load(e)
	}
}

// load prints nothing: the expression sets a register, which a later one uses.
func (p *printer) load(e expr.Any) {
	switch e := e.(type) {
	case *expr.Payload:
		if *p.at(e.DestRegister) = payloadValue(e); e.Len == 1 { // nft does not print that they are for TCP
			p.statements = p.statements[:len(p.statements)-1]
		}
	case *expr.Fib:
		*p.at(e.Register) = value{text: "fib " + either(e.FlagSADDR, "saddr", "daddr") + " type", registers: 1, constant: routeType}
	case *expr.Ct:
		*p.at(e.Register) = conntrack(e)
	case tracked:
		*p.at(e.Register) = conntrack(e.Ct)
	case *expr.Byteorder: // for a comparison of numbers
		*p.at(e.DestRegister) = *p.at(e.SourceRegister)
	case *expr.Numgen:
		*p.at(e.Register) = value{text: numgenText(e), registers: 1}
	case *expr.Hash:
		*p.at(e.DestRegister) = value{text: p.hashText(e), registers: 1}
	case *expr.Immediate:
		*p.at(e.Register) = value{immediate: e.Data, registers: 1}
	default:
		p.statement("%T", e) // no rule of ours has it: the test against nft would fail
	}
}

// conntrack is a value of connection tracking.
func conntrack(e *expr.Ct) value {
	direction := either(e.Direction == directionReply, "reply", "original")
	switch e.Key {
	case expr.CtKeySTATE:
		return value{text: "ct state", registers: 1, constant: ctState, isFlag: true}
	case expr.CtKeySTATUS:
		return value{text: "ct status", registers: 1, constant: ctStatus, isFlag: true}
	case expr.CtKeyPKTS:
		return value{text: "ct packets", registers: 2, constant: bigNumber}
	case expr.CtKeyPROTOSRC:
		return value{text: "ct " + direction + " proto-src", registers: 1}
	case expr.CtKeyPROTODST:
		return value{text: "ct " + direction + " proto-dst", registers: 1}
	case ctSourceIPv4:
		return value{text: "ct " + direction + " ip saddr", registers: 1}
	case ctSourceIPv6:
		return value{text: "ct " + direction + " ip6 saddr", registers: 4}
	case ctDestinationIPv4:
		return value{text: "ct " + direction + " ip daddr", registers: 1}
	default:
		return value{text: "ct " + direction + " ip6 daddr", registers: 4}
	}
}

func either[T any](condition bool, yes, no T) T {
	if condition {
		return yes
	}
	return no
}

func (p *printer) meta(e *expr.Meta) {
	name, constant := metaField(e.Key)
	if !e.SourceRegister {
		*p.at(e.Register) = value{text: name, registers: 1, constant: constant}
		return
	}
	from := p.at(e.Register)
	if from.immediate != nil {
		from.text = constant(from.immediate)
	}
	p.statement("%s set %s", name, from.text)
}

func metaField(key expr.MetaKey) (name string, constant func([]byte) string) {
	switch key {
	case expr.MetaKeyMARK:
		return "meta mark", mark
	case expr.MetaKeyPRIORITY:
		return "meta priority", priorityText
	case expr.MetaKeyIIFNAME:
		return "iifname", interfaceName
	default:
		return "meta l4proto", protocolName
	}
}

func protocolName(b []byte) string { return strings.ToLower(desired.Protocol(b[0]).String()) }

func payloadValue(e *expr.Payload) value {
	if e.Base == expr.PayloadBaseTransportHeader && e.Len == 1 {
		return value{text: "tcp flags", registers: 1, constant: func([]byte) string { return "! syn" }, isFlag: true}
	}
	if e.Base == expr.PayloadBaseTransportHeader {
		return value{text: "th " + either(e.Offset == 0, "sport", "dport"), registers: 1}
	}
	family := either(e.Len == 16, "ip6", "ip")
	source := e.Offset == 12 || e.Offset == 8 // of struct iphdr, of struct ipv6hdr
	return value{text: family + " " + either(source, "saddr", "daddr"), registers: int(e.Len) / 4, constant: address, isAddress: true}
}

func numgenText(e *expr.Numgen) string {
	return fmt.Sprintf("numgen random mod %d", e.Modulus) + offsetText(e.Offset)
}

func (p *printer) hashText(e *expr.Hash) string {
	var key []string
	for from, end := e.SourceRegister, e.SourceRegister+e.Length/4; from < end; from += uint32(p.at(from).registers) {
		key = append(key, p.at(from).text)
	}
	return fmt.Sprintf("jhash %s mod %d seed 0x%x", strings.Join(key, " . "), e.Modulus, e.Seed) + offsetText(e.Offset)
}

func offsetText(offset uint32) string {
	if offset == 0 {
		return ""
	}
	return fmt.Sprintf(" offset %d", offset)
}

// combined is the value after "&", "|", or after the mask of a prefix.
func (v value) combined(e *expr.Bitwise) value {
	if v.isAddress {
		for _, b := range e.Mask {
			for ; b != 0; b <<= 1 {
				v.bits++
			}
		}
		return v
	}
	switch {
	case v.isFlag: // nft prints its test without the comparison
		v.text += " " + v.constant(e.Mask)
	case binary.NativeEndian.Uint32(e.Xor) == 0:
		v.text += " & " + v.constant(e.Mask)
	default:
		v.text += " | " + v.constant(e.Xor)
	}
	return v
}

func (v value) compared(e *expr.Cmp) string {
	if v.isFlag {
		return v.text
	}
	with := v.constant(e.Data)
	if v.bits != 0 {
		with += fmt.Sprintf("/%d", v.bits)
	}
	operator := map[expr.CmpOp]string{expr.CmpOpEq: " ", expr.CmpOpNeq: " != ", expr.CmpOpGt: " > "}[e.Op]
	return v.text + operator + with
}

// key joins the values that a set is searched for.
func (p *printer) key(from uint32, spec *setSpec) string {
	parts := make([]string, len(spec.key))
	for i := range parts {
		v := p.at(from)
		parts[i] = v.text
		from += uint32(v.registers)
	}
	return strings.Join(parts, " . ")
}

func (p *printer) lookup(e *expr.Lookup) {
	spec := setNamed(e.SetName)
	key := p.key(e.SourceRegister, spec)
	switch {
	case !e.IsDestRegSet:
		p.statement("%s %s@%s", key, either(e.Invert, "!= ", ""), e.SetName)
	case spec.isVerdictMap():
		p.statement("%s vmap @%s", key, e.SetName)
	default:
		*p.at(e.DestRegister) = value{text: key + " map @" + e.SetName, registers: 1}
	}
}

func (p *printer) dynset(e *expr.Dynset) {
	operation := map[uint32]string{unix.NFT_DYNSET_OP_ADD: "add", unix.NFT_DYNSET_OP_UPDATE: "update", dynsetDelete: "delete"}[e.Operation]
	timeout := ""
	if e.Timeout != 0 {
		timeout = " timeout " + duration(e.Timeout)
	}
	value := ""
	if e.SrcRegData != 0 {
		value = " : " + p.at(e.SrcRegData).text
	}
	if len(e.Exprs) > 0 {
		value = " counter" // the only one that we use
	}
	p.statement("%s @%s { %s%s%s }", operation, e.SetName, p.key(e.SrcRegKey, setNamed(e.SetName)), timeout, value)
}

func setNamed(name string) *setSpec {
	for i := range setSpecs {
		if setSpecs[i].name == name {
			return &setSpecs[i]
		}
	}
	return &setSpec{}
}

func verdictText(e *expr.Verdict) string {
	switch e.Kind {
	case expr.VerdictGoto:
		return "goto " + e.Chain
	case expr.VerdictJump:
		return "jump " + e.Chain
	case expr.VerdictReturn:
		return "return"
	case expr.VerdictAccept:
		return "accept"
	default:
		return "drop"
	}
}

func mark(b []byte) string { return fmt.Sprintf("0x%08x", binary.NativeEndian.Uint32(b)) }

// priorityText is a class of a queueing discipline, major and minor number.
func priorityText(b []byte) string {
	n := binary.NativeEndian.Uint32(b)
	if n == 0 {
		return "none"
	}
	return fmt.Sprintf("%x:%x", n>>16, n&0xffff)
}

func address(b []byte) string {
	a, _ := netip.AddrFromSlice(b)
	return a.String()
}

func interfaceName(b []byte) string {
	name := strings.TrimRight(string(b), "\x00")
	if len(name) == len(b) { // without terminating zeros it is a prefix
		name += "*"
	}
	return fmt.Sprintf("%q", name)
}

func routeType([]byte) string { return "local" }

func ctStatus([]byte) string { return "dnat" }

func ctState(b []byte) string {
	return either(binary.NativeEndian.Uint32(b) == ctStateInvalid, "invalid", "established")
}

func bigNumber(b []byte) string { return strconv.FormatUint(binary.BigEndian.Uint64(b), 10) }

// duration prints whole seconds without parts that are 0, and 24 hours as a day.
func duration(d time.Duration) string {
	return strings.NewReplacer("24h0m0s", "1d", "h0m0s", "h", "m0s", "m").Replace(d.String())
}
