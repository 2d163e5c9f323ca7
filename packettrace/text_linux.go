package packettrace

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
)

// printer prints a rule like nft. A part that it does not know is the name of the expression.
type printer struct {
	family     byte
	statements []string
	registers  map[uint32]value
	comment    string
	rejects    bool
	elements   func(set string) []element // nil if they cannot be read
	// dependency is the last statement if that only says which protocol the next is about.
	dependency string
}

// value is what a register has.
type value struct {
	text   string
	format func([]byte) string
	data   []byte // of a constant
	flags  bool   // some bits of a number: their comparison with 0 tells whether one is set
}

func (p *printer) text() string { return strings.Join(p.statements, " ") }

func (p *printer) add(format string, args ...any) {
	p.statements = append(p.statements, fmt.Sprintf(format, args...))
	p.dependency = ""
}

// registerKey returns the key of a register: one of 16 bytes is the first of four.
func registerKey(number uint32) uint32 {
	if number < unix.NFT_REG32_00 {
		return unix.NFT_REG32_00 + (number-1)*4
	}
	return number
}

func (p *printer) get(register uint32) value {
	v := p.registers[registerKey(register)]
	if v.format == nil {
		v.format = number
	}
	return v
}

func (p *printer) set(register uint32, v value) { p.registers[registerKey(register)] = v }

// rule prints the expressions of a rule.
func (p *printer) rule(encoded []byte) {
	p.registers = map[uint32]value{}
	list, err := netlink.NewAttributeDecoder(encoded)
	if err != nil {
		return
	}
	for list.Next() {
		var name string
		var data []byte
		list.Nested(func(e *netlink.AttributeDecoder) error {
			for e.Next() {
				switch e.Type() {
				case unix.NFTA_EXPR_NAME:
					name = e.String()
				case unix.NFTA_EXPR_DATA:
					data = e.Bytes()
				}
			}
			return nil
		})
		p.expression(name, data)
	}
}

// expression prints one expression, or sets a register.
func (p *printer) expression(name string, data []byte) {
	e := p.decode(name, data)
	switch e := e.(type) {
	case *expr.Cmp:
		p.compare(e)
	case *expr.Bitwise:
		p.mask(e)
	case *expr.Range:
		v := p.get(e.Register)
		p.add("%s %s%s-%s", v.text, operator(e.Op), v.format(e.FromData), v.format(e.ToData))
	case *expr.Lookup:
		p.lookup(e)
	case *expr.Meta:
		p.meta(e)
	case *expr.Payload:
		p.set(e.DestRegister, p.payload(e))
	case *expr.Ct:
		p.set(e.Register, ctValue(e))
	case *expr.Fib:
		p.set(e.Register, value{text: "fib"})
	case *expr.Numgen:
		p.set(e.Register, value{text: fmt.Sprintf("numgen mod %d", e.Modulus)})
	case *expr.Hash:
		p.set(e.DestRegister, value{text: fmt.Sprintf("jhash mod %d", e.Modulus)})
	case *expr.Immediate:
		p.set(e.Register, value{text: "0x" + hex.EncodeToString(e.Data), data: e.Data})
	default:
		p.statement(name, e)
	}
}

// decode returns nil for an expression that is only known by its name.
func (p *printer) decode(name string, data []byte) expr.Any {
	known := map[string]expr.Any{
		"bitwise": &expr.Bitwise{}, "cmp": &expr.Cmp{}, "ct": &expr.Ct{}, "fib": &expr.Fib{}, "hash": &expr.Hash{},
		"immediate": &expr.Immediate{}, "lookup": &expr.Lookup{}, "match": &expr.Match{}, "meta": &expr.Meta{}, "nat": &expr.NAT{},
		"numgen": &expr.Numgen{}, "payload": &expr.Payload{}, "range": &expr.Range{}, "target": &expr.Target{},
	}
	e := known[name]
	if e == nil || expr.Unmarshal(p.family, data, e) != nil {
		return p.opaque(name, data)
	}
	if i, ok := e.(*expr.Immediate); ok && i.Register == unix.NFT_REG_VERDICT {
		e = &expr.Verdict{}
		if expr.Unmarshal(p.family, data, e) != nil {
			return nil
		}
	}
	return e
}

// opaque returns the name of an extension of iptables whose data are not known.
func (p *printer) opaque(name string, data []byte) expr.Any {
	extension := attribute(netlink.Message{Data: append(make([]byte, nfgenLen), data...)}, 1) // NFTA_MATCH_NAME, NFTA_TARGET_NAME
	switch name {
	case "match":
		return &expr.Match{Name: extension}
	case "target":
		return &expr.Target{Name: extension}
	default:
		return nil
	}
}

// statement prints what sets no register.
func (p *printer) statement(name string, e expr.Any) {
	switch e := e.(type) {
	case *expr.Verdict:
		p.add("%s", verdictText(uint32(int32(e.Kind)), e.Chain))
	case *expr.NAT:
		p.add("%s to %s", map[expr.NATType]string{expr.NATTypeSourceNAT: "snat", expr.NATTypeDestNAT: "dnat"}[e.Type], p.endpoint(e))
	case *expr.Match:
		p.match(e)
	case *expr.Target:
		p.rejects = p.rejects || e.Name == "REJECT"
		p.add("xt target %q", e.Name)
	default:
		p.rejects = p.rejects || name == "reject"
		p.add("%s", cmp.Or(map[string]string{"masq": "masquerade", "redir": "redirect"}[name], name))
	}
}

// endpoint prints where a rule translates to.
func (p *printer) endpoint(e *expr.NAT) string {
	address, port := p.get(e.RegAddrMin), p.get(e.RegProtoMin)
	a, ok := netip.AddrFromSlice(address.data)
	if !ok {
		return address.text
	}
	if len(port.data) < 2 {
		return a.String()
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port.data)).String()
}

// match prints an extension of iptables.
func (p *printer) match(e *expr.Match) {
	switch info := e.Info.(type) {
	case *xt.Comment:
		p.comment = strings.TrimRight(string(*info), "\x00")
	case *xt.Tcp:
		p.ports("tcp", info.SrcPorts, info.DstPorts, uint8(info.InvFlags))
	case *xt.Udp:
		p.ports("udp", info.SrcPorts, info.DstPorts, uint8(info.InvFlags))
	default:
		p.add("xt match %q", e.Name)
	}
}

// ports prints the ranges of ports of an extension of iptables.
func (p *printer) ports(protocol string, source, destination [2]uint16, inverted uint8) {
	for i, r := range [][2]uint16{source, destination} {
		not := ""
		if inverted&(1<<i) != 0 {
			not = "!= "
		}
		field := protocol + []string{" sport ", " dport "}[i]
		switch {
		case r == [2]uint16{0, 0xffff} && not == "":
		case r[0] == r[1]:
			p.add("%s%s%d", field, not, r[0])
		default:
			p.add("%s%s%d-%d", field, not, r[0], r[1])
		}
	}
}

func (p *printer) compare(e *expr.Cmp) {
	v := p.get(e.Register)
	// A range is two comparisons.
	if from := v.text + " >= "; e.Op == expr.CmpOpLte && len(p.statements) > 0 && strings.HasPrefix(p.statements[len(p.statements)-1], from) {
		p.statements[len(p.statements)-1] = v.text + " " + strings.TrimPrefix(p.statements[len(p.statements)-1], from) + "-" + v.format(e.Data)
		return
	}
	text, op := v.format(e.Data), operator(e.Op)
	if v.flags && e.Op == expr.CmpOpNeq && strings.Trim(string(e.Data), "\x00") == "" {
		op = "" // one of the flags is set
	} else if v.flags && strings.Trim(string(e.Data), "\x00") == "" {
		op = "!= "
	}
	p.add("%s %s%s", v.text, op, text)
	if e.Op == expr.CmpOpEq && (v.text == "meta l4proto" || v.text == "meta nfproto") {
		p.dependency = text
	}
}

func operator(op expr.CmpOp) string {
	return map[expr.CmpOp]string{
		expr.CmpOpNeq: "!= ", expr.CmpOpLt: "< ", expr.CmpOpLte: "<= ", expr.CmpOpGt: "> ", expr.CmpOpGte: ">= ",
	}[op]
}

// mask changes the value of a register to that after "&" and "^".
func (p *printer) mask(e *expr.Bitwise) {
	v := p.get(e.SourceRegister)
	format := v.format
	switch {
	case strings.HasSuffix(v.text, "addr"):
		bits := 0
		for _, b := range e.Mask {
			for ; b != 0; b <<= 1 {
				bits++
			}
		}
		v.format = func(b []byte) string { return fmt.Sprintf("%s/%d", format(b), bits) }
	case v.text == "ct state" || v.text == "ct status":
		mask := format(e.Mask)
		v.flags = true
		v.format = func(b []byte) string {
			if strings.Trim(string(b), "\x00") == "" {
				return mask
			}
			return format(b)
		}
	default:
		v.text += " & " + format(e.Mask)
	}
	p.set(e.DestRegister, v)
}

func (p *printer) lookup(e *expr.Lookup) {
	v := p.get(e.SourceRegister)
	not := ""
	if e.Invert {
		not = "!= "
	}
	switch {
	case !e.IsDestRegSet:
		p.add("%s %s%s", v.text, not, p.members(e.SetName, v.format))
	case e.DestRegister == unix.NFT_REG_VERDICT:
		p.add("%s vmap @%s", v.text, e.SetName)
	default:
		p.set(e.DestRegister, value{text: v.text + " map @" + e.SetName})
	}
}

// members prints a set: its elements if it has no name of its own and one field.
func (p *printer) members(set string, format func([]byte) string) string {
	var list []string
	if strings.HasPrefix(set, "__set") && p.elements != nil {
		for _, e := range p.elements(set) {
			if e.end == nil || string(e.end) == string(e.first) {
				list = append(list, format(e.first))
			} else {
				list = append(list, format(e.first)+"-"+format(e.end))
			}
		}
	}
	if list == nil {
		return "@" + set
	}
	return "{ " + strings.Join(list, ", ") + " }"
}

func (p *printer) meta(e *expr.Meta) {
	v := metaValue(e.Key)
	if !e.SourceRegister {
		p.set(e.Register, v)
		return
	}
	from := p.get(e.Register)
	if from.data != nil {
		from.text = v.format(from.data)
	}
	p.add("%s set %s", v.text, from.text)
}

func metaValue(key expr.MetaKey) value {
	switch key {
	case expr.MetaKeyL4PROTO:
		return value{text: "meta l4proto", format: protocol}
	case expr.MetaKeyNFPROTO:
		return value{text: "meta nfproto", format: func(b []byte) string {
			return map[string]string{"\x02": "ipv4", "\x0a": "ipv6"}[string(b)]
		}}
	case expr.MetaKeyIIFNAME:
		return value{text: "iifname", format: interfaceName}
	case expr.MetaKeyOIFNAME:
		return value{text: "oifname", format: interfaceName}
	case expr.MetaKeyIIF:
		return value{text: "iif", format: index}
	case expr.MetaKeyOIF:
		return value{text: "oif", format: index}
	case expr.MetaKeyMARK:
		return value{text: "meta mark", format: hexadecimal}
	case expr.MetaKeyPRIORITY:
		return value{text: "meta priority", format: hexadecimal}
	case expr.MetaKeyNFTRACE:
		return value{text: "meta nftrace", format: number}
	default:
		return value{text: fmt.Sprintf("meta key %d", key), format: hexadecimal}
	}
}

// payload names a field of the packet's headers.
func (p *printer) payload(e *expr.Payload) value {
	v6 := headerOf(netip.IPv6Unspecified().BitLen())
	v4 := headerOf(netip.IPv4Unspecified().BitLen())
	is6 := p.family == unix.NFPROTO_IPV6 || p.dependency == "ipv6" || e.Base == expr.PayloadBaseNetworkHeader && e.Len > v4.size
	names := map[expr.Payload]value{}
	name := func(base expr.PayloadBase, offset, size uint32, text string, format func([]byte) string) {
		names[expr.Payload{Base: base, Offset: offset, Len: size}] = value{text: text, format: format}
	}
	if e.Base == expr.PayloadBaseNetworkHeader {
		family, at := "ip", v4
		name(e.Base, 9, 1, "ip protocol", protocol)
		if is6 {
			family, at = "ip6", v6
			name(e.Base, 6, 1, "ip6 nexthdr", protocol)
		}
		name(e.Base, at.source, e.Len, family+" saddr", prefixOf(at.size))
		name(e.Base, at.destination, e.Len, family+" daddr", prefixOf(at.size))
		p.drop("ipv4", "ipv6")
	}
	if e.Base == expr.PayloadBaseTransportHeader {
		header := "th"
		if p.dependency == "tcp" || p.dependency == "udp" || p.dependency == "sctp" {
			header = p.dependency
		}
		name(e.Base, sourcePort, 2, header+" sport", number)
		name(e.Base, destinationPort, 2, header+" dport", number)
		name(e.Base, tcpFlags, 1, header+" flags", hexadecimal)
		p.drop("tcp", "udp", "sctp")
	}
	if v, ok := names[expr.Payload{Base: e.Base, Offset: e.Offset, Len: e.Len}]; ok {
		return v
	}
	const bits = 8
	return value{text: fmt.Sprintf("@%s,%d,%d", [...]string{"ll", "nh", "th"}[e.Base%3], e.Offset*bits, e.Len*bits), format: hexadecimal}
}

// drop removes the last statement if it only names one of the protocols, as nft does.
func (p *printer) drop(names ...string) {
	for _, name := range names {
		if p.dependency == name {
			p.statements = p.statements[:len(p.statements)-1]
			p.dependency = ""
		}
	}
}

// prefixOf prints an address, or the prefix that its first bytes are.
func prefixOf(size uint32) func([]byte) string {
	return func(b []byte) string {
		a, ok := netip.AddrFromSlice(append(slices.Clip(b), make([]byte, max(0, int(size)-len(b)))...))
		const bits = 8
		if ok && len(b) < int(size) {
			return netip.PrefixFrom(a, len(b)*bits).String()
		}
		return a.String()
	}
}

func ctValue(e *expr.Ct) value {
	switch e.Key {
	case expr.CtKeySTATE:
		return value{text: "ct state", format: flags("invalid", "established", "related", "new", "", "", "untracked")}
	case expr.CtKeySTATUS:
		return value{text: "ct status", format: flags("expected", "seen-reply", "assured", "confirmed", "snat", "dnat")}
	case expr.CtKeyMARK:
		return value{text: "ct mark", format: hexadecimal}
	default:
		return value{text: fmt.Sprintf("ct key %d", e.Key), format: hexadecimal}
	}
}

// flags names the bits of a number in the byte order of the machine.
func flags(names ...string) func([]byte) string {
	return func(b []byte) string {
		if len(b) != 4 {
			return hexadecimal(b)
		}
		var set []string
		for i, name := range names {
			if binary.NativeEndian.Uint32(b)&(1<<i) != 0 {
				set = append(set, name)
			}
		}
		return strings.Join(set, ",")
	}
}

func protocol(b []byte) string {
	if len(b) != 1 {
		return hexadecimal(b)
	}
	switch p := desired.Protocol(b[0]); p {
	case desired.TCP, desired.UDP, desired.SCTP:
		return strings.ToLower(p.String())
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "ipv6-icmp"
	default:
		return strconv.Itoa(int(b[0]))
	}
}

func interfaceName(b []byte) string {
	name := strings.TrimRight(string(b), "\x00")
	if len(name) == len(b) { // without terminating zeros it is a prefix
		name += "*"
	}
	return strconv.Quote(name)
}

// number prints a number in network byte order.
func number(b []byte) string {
	const most = 8
	if len(b) == 0 || len(b) > most {
		return hexadecimal(b)
	}
	return strconv.FormatUint(binary.BigEndian.Uint64(append(make([]byte, most-len(b)), b...)), 10)
}

// index prints the number of an interface, in the byte order of the machine.
func index(b []byte) string {
	if len(b) != 4 {
		return hexadecimal(b)
	}
	return strconv.FormatUint(uint64(binary.NativeEndian.Uint32(b)), 10)
}

// hexadecimal prints a number of four bytes in the byte order of the machine, and others in
// that of the network.
func hexadecimal(b []byte) string {
	if len(b) == 4 {
		return fmt.Sprintf("0x%08x", binary.NativeEndian.Uint32(b))
	}
	return "0x" + hex.EncodeToString(b)
}
