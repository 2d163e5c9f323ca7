package nftext

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// kind is the type of a value.
type kind struct {
	text   func(p *printer, data []byte) string
	host   bool // a number in the byte order of the machine
	prefix bool // ranges may be prefixes
	flags  bool // each bit has a name
}

var isLittleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1 // read-only

// number is the value of up to eight bytes.
func (k *kind) number(b []byte) uint64 {
	const most = 8
	if len(b) > most {
		return 0
	}
	if k.host {
		b = reversed(b)
	}
	return binary.BigEndian.Uint64(append(make([]byte, most-len(b)), b...))
}

// reversed returns a number of the machine's byte order in that of the network.
func reversed(b []byte) []byte {
	b = slices.Clone(b)
	if isLittleEndian {
		slices.Reverse(b)
	}
	return b
}

// named is a kind whose values have names. Others are numbers.
func named(host bool, texts map[uint64]string) *kind {
	k := &kind{host: host}
	k.text = func(_ *printer, b []byte) string {
		n := k.number(b)
		if text, ok := texts[n]; ok {
			return text
		}
		return strconv.FormatUint(n, 10)
	}
	return k
}

// counted are names of the numbers from 0.
func counted(texts ...string) map[uint64]string {
	all := map[uint64]string{}
	for i, text := range texts {
		all[uint64(i)] = text
	}
	return all
}

// flagged is a kind whose bits have names, the lowest first.
func flagged(host bool, texts ...string) *kind {
	k := &kind{host: host, flags: true}
	k.text = func(_ *printer, b []byte) string {
		n := k.number(b)
		var set []string
		for i, text := range texts {
			if n&(1<<i) != 0 {
				set = append(set, text)
			}
		}
		if len(set) == 0 {
			return fmt.Sprintf("0x%x", n)
		}
		return strings.Join(set, ",")
	}
	return k
}

// addressKind is the kind of an address, or of the first bytes that a prefix of it fills.
func addressKind(size int) *kind {
	return &kind{prefix: true, text: func(_ *printer, b []byte) string {
		a, ok := netip.AddrFromSlice(append(slices.Clip(b), make([]byte, max(0, size-len(b)))...))
		if ok && len(b) < size {
			return netip.PrefixFrom(a, len(b)*8).String()
		}
		return a.String()
	}}
}

// hexadecimal prints bytes as they are in the packet.
func hexadecimal(b []byte) string { return "0x" + hex.EncodeToString(b) }

// The kinds. Their names are those of nft describe.
var (
	raw      = &kind{text: func(_ *printer, b []byte) string { return hexadecimal(b) }}                                        // read-only
	numbers  = named(false, nil)                                                                                               // read-only
	integers = named(true, nil)                                                                                                // read-only
	marks    = &kind{host: true, text: func(_ *printer, b []byte) string { return fmt.Sprintf("0x%08x", integers.number(b)) }} // read-only
	handles  = &kind{host: true, text: func(_ *printer, b []byte) string {                                                     // read-only
		n := integers.number(b)
		if n == 0 {
			return "none"
		}
		return fmt.Sprintf("%x:%x", n>>16, n&0xffff)
	}}
	address4 = addressKind(net.IPv4len)                                                                                     // read-only
	address6 = addressKind(net.IPv6len)                                                                                     // read-only
	linkAddr = &kind{text: func(_ *printer, b []byte) string { return net.HardwareAddr(b).String() }}                       // read-only
	devices  = &kind{host: true, text: func(_ *printer, b []byte) string { return deviceName(b) }}                          // read-only
	indexes  = &kind{host: true, text: func(p *printer, b []byte) string { return p.deviceOf(uint32(integers.number(b))) }} // read-only
	presence = &kind{text: func(_ *printer, b []byte) string {                                                              // read-only
		return map[bool]string{true: "missing", false: "exists"}[numbers.number(b) == 0]
	}}
	families    = named(false, map[uint64]string{unix.NFPROTO_IPV4: "ipv4", unix.NFPROTO_IPV6: "ipv6"})                                                                       // read-only
	linkTypes   = named(true, map[uint64]string{unix.ARPHRD_ETHER: "ether", unix.ARPHRD_LOOPBACK: "loopback", unix.ARPHRD_PPP: "ppp", unix.ARPHRD_NONE: "none"})              // read-only
	etherTypes  = named(false, map[uint64]string{unix.ETH_P_IP: "ip", unix.ETH_P_IPV6: "ip6", unix.ETH_P_ARP: "arp", unix.ETH_P_8021Q: "8021q", unix.ETH_P_8021AD: "8021ad"}) // read-only
	packetTypes = named(false, counted("host", "broadcast", "multicast", "other"))                                                                                            // read-only
	groups      = named(true, counted("default"))                                                                                                                             // read-only
	routeTypes  = named(true, counted("unspec", "unicast", "local", "broadcast", "anycast", "multicast", "blackhole", "unreachable", "prohibit"))                             // read-only
	tcpFlagKind = flagged(false, "fin", "syn", "rst", "psh", "ack", "urg", "ecn", "cwr")                                                                                      // read-only
	states      = flagged(true, "invalid", "established", "related", "new", "", "", "untracked")                                                                              // read-only
	statuses    = flagged(true, "expected", "seen-reply", "assured", "confirmed", "snat", "dnat", "", "", "", "dying")                                                        // read-only
	directions  = named(false, counted("original", "reply"))                                                                                                                  // read-only
	protocols   = named(false, map[uint64]string{                                                                                                                             // read-only
		unix.IPPROTO_ICMP: "icmp", unix.IPPROTO_IGMP: "igmp", unix.IPPROTO_IPIP: "ipencap", unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp",
		unix.IPPROTO_DCCP: "dccp", unix.IPPROTO_IPV6: "ipv6", unix.IPPROTO_GRE: "gre", unix.IPPROTO_ESP: "esp", unix.IPPROTO_AH: "ah",
		unix.IPPROTO_ICMPV6: "ipv6-icmp", 89: "ospf", unix.IPPROTO_PIM: "pim", unix.IPPROTO_COMP: "ipcomp", 112: "vrrp", unix.IPPROTO_SCTP: "sctp", unix.IPPROTO_UDPLITE: "udplite",
	})
	icmpTypes = named(false, map[uint64]string{ // read-only
		0: "echo-reply", 3: "destination-unreachable", 4: "source-quench", 5: "redirect", 8: "echo-request", 9: "router-advertisement", 10: "router-solicitation",
		11: "time-exceeded", 12: "parameter-problem", 13: "timestamp-request", 14: "timestamp-reply", 15: "info-request", 16: "info-reply",
		17: "address-mask-request", 18: "address-mask-reply",
	})
	icmp6Types = named(false, map[uint64]string{ // read-only
		1: "destination-unreachable", 2: "packet-too-big", 3: "time-exceeded", 4: "parameter-problem", 128: "echo-request", 129: "echo-reply",
		130: "mld-listener-query", 131: "mld-listener-report", 132: "mld-listener-done", 133: "nd-router-solicit", 134: "nd-router-advert",
		135: "nd-neighbor-solicit", 136: "nd-neighbor-advert", 137: "nd-redirect", 138: "router-renumbering", 141: "ind-neighbor-solicit",
		142: "ind-neighbor-advert", 143: "mld2-listener-report",
	})
	dscps = shifted(2, named(false, map[uint64]string{ // read-only
		0: "cs0", 1: "le", 8: "cs1", 10: "af11", 12: "af12", 14: "af13", 16: "cs2", 18: "af21", 20: "af22", 22: "af23", 24: "cs3", 26: "af31", 28: "af32",
		30: "af33", 32: "cs4", 34: "af41", 36: "af42", 38: "af43", 40: "cs5", 44: "va", 46: "ef", 48: "cs6", 56: "cs7",
	}))
)

// The codes of ICMP messages.
var (
	icmpCodes = named(false, map[uint64]string{ // read-only
		0: "net-unreachable", 1: "host-unreachable", 2: "prot-unreachable", 3: "port-unreachable", 9: "net-prohibited", 10: "host-prohibited", 13: "admin-prohibited",
	})
	icmp6Codes = named(false, map[uint64]string{ // read-only
		0: "no-route", 1: "admin-prohibited", 3: "addr-unreachable", 4: "port-unreachable", 5: "policy-fail", 6: "reject-route",
	})
	icmpxCodes = named(false, counted("no-route", "port-unreachable", "host-unreachable", "admin-prohibited")) // read-only
)

// shifted is a kind of the upper bits of a byte.
func shifted(by int, k *kind) *kind {
	return &kind{text: func(p *printer, b []byte) string {
		if len(b) != 1 {
			return hexadecimal(b)
		}
		return k.text(p, []byte{b[0] >> by})
	}}
}

func deviceName(b []byte) string {
	name := strings.TrimRight(string(b), "\x00")
	if len(name) == len(b) { // without terminating zeros it is a prefix
		name += "*"
	}
	return strconv.Quote(name)
}

func (p *printer) deviceOf(index uint32) string {
	name := ""
	if p.device != nil {
		name = p.device(index)
	}
	if name == "" {
		return strconv.FormatUint(uint64(index), 10)
	}
	return strconv.Quote(name)
}

// field is a part of a packet, or of what the kernel knows about it.
type field struct {
	text string
	kind *kind
}

// place of a field in a header.
type fieldAt struct {
	header       string
	offset, size uint32
}

var headerFields = map[fieldAt]field{ // read-only
	{"ether", 0, 6}: {"ether daddr", linkAddr}, {"ether", 6, 6}: {"ether saddr", linkAddr}, {"ether", 12, 2}: {"ether type", etherTypes},
	{"ip", 0, 1}: {"ip version . hdrlength", numbers}, {"ip", 1, 1}: {"ip tos", numbers}, {"ip", 2, 2}: {"ip length", numbers}, {"ip", 4, 2}: {"ip id", numbers},
	{"ip", 6, 2}: {"ip frag-off", numbers}, {"ip", 8, 1}: {"ip ttl", numbers}, {"ip", 9, 1}: {"ip protocol", protocols}, {"ip", 10, 2}: {"ip checksum", numbers},
	{"ip6", 4, 2}: {"ip6 length", numbers}, {"ip6", 6, 1}: {"ip6 nexthdr", protocols}, {"ip6", 7, 1}: {"ip6 hoplimit", numbers},
	{"tcp", 0, 2}: {"tcp sport", numbers}, {"tcp", 2, 2}: {"tcp dport", numbers}, {"tcp", 13, 1}: {"tcp flags", tcpFlagKind}, {"tcp", 14, 2}: {"tcp window", numbers},
	{"udp", 0, 2}: {"udp sport", numbers}, {"udp", 2, 2}: {"udp dport", numbers}, {"udp", 4, 2}: {"udp length", numbers},
	{"sctp", 0, 2}: {"sctp sport", numbers}, {"sctp", 2, 2}: {"sctp dport", numbers}, {"dccp", 0, 2}: {"dccp sport", numbers}, {"dccp", 2, 2}: {"dccp dport", numbers},
	{"th", 0, 2}: {"th sport", numbers}, {"th", 2, 2}: {"th dport", numbers},
	{"icmp", 0, 1}: {"icmp type", icmpTypes}, {"icmp", 1, 1}: {"icmp code", icmpCodes},
	{"ipv6-icmp", 0, 1}: {"icmpv6 type", icmp6Types}, {"ipv6-icmp", 1, 1}: {"icmpv6 code", icmp6Codes},
	{"esp", 0, 4}: {"esp spi", numbers}, {"ah", 4, 4}: {"ah spi", numbers},
}

// partOf are some bits of a field.
type partOf struct{ field, mask string }

var parts = map[partOf]field{ // read-only
	{"ip tos", "\xfc"}: {"ip dscp", dscps}, {"ip version . hdrlength", "\xf0"}: {"ip version", shifted(4, numbers)},
}

// payload loads a field of a header, or several that follow each other.
func (p *printer) payload(a attributes) {
	if a.get(unix.NFTA_PAYLOAD_SREG) != nil {
		p.doubt("payload")
		return
	}
	base, at, size := a.u32(unix.NFTA_PAYLOAD_BASE), a.u32(unix.NFTA_PAYLOAD_OFFSET), a.u32(unix.NFTA_PAYLOAD_LEN)
	list := p.fieldsAt(base, at, size)
	if len(list) == 0 {
		p.unknown = true
		names := [...]string{"ll", "nh", "th", "ih"}
		text := fmt.Sprintf("@%s,%d,%d", names[base%uint32(len(names))], at*8, size*8)
		list = []*value{{text: text, kind: raw, size: int(size)}}
	} else {
		p.removeImplied(base)
	}
	v := list[0]
	if len(list) > 1 {
		v = &value{text: p.textOf(list), kind: raw, size: int(size), fields: list}
	}
	p.put(a.u32(unix.NFTA_PAYLOAD_DREG), v)
}

// fieldsAt returns the fields that fill some bytes of a header.
func (p *printer) fieldsAt(base, offset, size uint32) (list []*value) {
	for size > 0 {
		f, n := p.fieldAt(base, offset, size)
		if n == 0 {
			return nil
		}
		list = append(list, &value{text: f.text, kind: f.kind, size: int(n)})
		offset, size = offset+n, size-n
	}
	return list
}

// fieldAt returns the longest field of at most some bytes, and its size.
func (p *printer) fieldAt(base, offset, most uint32) (f field, size uint32) {
	at := fieldAt{"", offset, most}
	switch base {
	case unix.NFT_PAYLOAD_LL_HEADER:
		at.header = "ether"
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		at.header = p.network
		if f, size = p.addressAt(at); size > 0 {
			return f, size
		}
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		at.header = cmp.Or(p.transport, "th")
		if at.header == "icmp" || at.header == "ipv6-icmp" { // implies the IP family too
			p.removeImplied(unix.NFT_PAYLOAD_NETWORK_HEADER)
		}
	default: // of the content of the transport, nothing is known
		return f, 0
	}
	for ; at.size > 0; at.size-- {
		if f = headerFields[at]; f.kind != nil {
			return f, at.size
		}
	}
	if base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && at.header != "th" {
		f = headerFields[fieldAt{"th", offset, 2}]
		return f, min(most, 2) * uint32(min(len(f.text), 1))
	}
	return f, 0
}

// addressAt returns a field that is an address, or the first bytes of one, and its size.
func (p *printer) addressAt(at fieldAt) (field, uint32) {
	for _, family := range []struct {
		name string
		bits int
		kind *kind
	}{{"ip", 32, address4}, {"ip6", 128, address6}} {
		h := HeaderOf(family.bits)
		if at.header != family.name {
			continue
		}
		switch at.offset {
		case h.Source:
			return field{family.name + " saddr", family.kind}, min(at.size, h.Size)
		case h.Destination:
			return field{family.name + " daddr", family.kind}, min(at.size, h.Size)
		}
	}
	return field{}, 0
}

var metaFields = map[uint32]field{ // read-only
	unix.NFT_META_LEN: {"meta length", integers}, unix.NFT_META_PROTOCOL: {"meta protocol", etherTypes}, unix.NFT_META_PRIORITY: {"meta priority", handles},
	unix.NFT_META_MARK: {"meta mark", marks}, unix.NFT_META_IIF: {"iif", indexes}, unix.NFT_META_OIF: {"oif", indexes}, unix.NFT_META_IIFNAME: {"iifname", devices},
	unix.NFT_META_OIFNAME: {"oifname", devices}, unix.NFT_META_IIFTYPE: {"meta iiftype", linkTypes}, unix.NFT_META_OIFTYPE: {"meta oiftype", linkTypes},
	unix.NFT_META_SKUID: {"meta skuid", integers}, unix.NFT_META_SKGID: {"meta skgid", integers}, unix.NFT_META_NFTRACE: {"meta nftrace", numbers},
	unix.NFT_META_NFPROTO: {"meta nfproto", families}, unix.NFT_META_L4PROTO: {"meta l4proto", protocols}, unix.NFT_META_PKTTYPE: {"meta pkttype", packetTypes},
	unix.NFT_META_CPU: {"meta cpu", integers}, unix.NFT_META_IIFGROUP: {"iifgroup", groups}, unix.NFT_META_OIFGROUP: {"oifgroup", groups}, unix.NFT_META_CGROUP: {"meta cgroup", integers},
}

// metaSizes are the sizes of values that do not have four bytes.
var metaSizes = map[uint32]int{ // read-only
	unix.NFT_META_PROTOCOL: 2, unix.NFT_META_IIFNAME: unix.IFNAMSIZ, unix.NFT_META_OIFNAME: unix.IFNAMSIZ, unix.NFT_META_IIFTYPE: 2, unix.NFT_META_OIFTYPE: 2,
	unix.NFT_META_NFTRACE: 1, unix.NFT_META_NFPROTO: 1, unix.NFT_META_L4PROTO: 1, unix.NFT_META_PKTTYPE: 1,
}

// meta loads or sets what the kernel knows about the packet.
func (p *printer) meta(a attributes) {
	at := a.u32(unix.NFTA_META_KEY)
	f, ok := metaFields[at]
	if !ok {
		p.unknown = true
		f = field{fmt.Sprintf("meta key %d", at), numbers}
	}
	if register := a.get(unix.NFTA_META_SREG); register != nil {
		p.add("%s set %s", f.text, p.assigned(a.u32(unix.NFTA_META_SREG), f.kind))
		return
	}
	size, special := metaSizes[at]
	if !special {
		size = 4
	}
	p.put(a.u32(unix.NFTA_META_DREG), &value{text: f.text, kind: f.kind, size: size})
}

type sizedField struct {
	field

	size int
}

// ctFields are about the connection, or about one of its directions.
var ctFields = map[uint32]sizedField{ // read-only
	unix.NFT_CT_STATE: {field{"state", states}, 4}, unix.NFT_CT_DIRECTION: {field{"direction", directions}, 1}, unix.NFT_CT_STATUS: {field{"status", statuses}, 4},
	unix.NFT_CT_MARK: {field{"mark", marks}, 4}, unix.NFT_CT_L3PROTOCOL: {field{"l3proto", families}, 1}, unix.NFT_CT_PROTOCOL: {field{"protocol", protocols}, 1},
	unix.NFT_CT_PROTO_SRC: {field{"proto-src", numbers}, 2}, unix.NFT_CT_PROTO_DST: {field{"proto-dst", numbers}, 2}, unix.NFT_CT_PKTS: {field{"packets", integers}, 8},
	unix.NFT_CT_BYTES: {field{"bytes", integers}, 8}, unix.NFT_CT_ZONE: {field{"zone", integers}, 2}, unix.NFT_CT_SRC_IP: {field{"ip saddr", address4}, 4},
	unix.NFT_CT_DST_IP: {field{"ip daddr", address4}, 4}, unix.NFT_CT_SRC_IP6: {field{"ip6 saddr", address6}, 16}, unix.NFT_CT_DST_IP6: {field{"ip6 daddr", address6}, 16},
}

// connection loads or sets something of the connection.
func (p *printer) connection(a attributes) {
	at := a.u32(unix.NFTA_CT_KEY)
	f, ok := ctFields[at]
	if !ok {
		p.unknown = true
		f.text, f.kind = fmt.Sprintf("key %d", at), numbers
	}
	text := "ct "
	if direction := a.get(unix.NFTA_CT_DIRECTION); direction != nil {
		text += directions.text(p, direction) + " "
	}
	text += f.text
	if a.get(unix.NFTA_CT_SREG) != nil {
		p.add("%s set %s", text, p.assigned(a.u32(unix.NFTA_CT_SREG), f.kind))
		return
	}
	p.put(a.u32(unix.NFTA_CT_DREG), &value{text: text, kind: f.kind, size: f.size})
}

// fib searches the routes.
func (p *printer) fib(a attributes) {
	var keys []string
	flags := a.u32(unix.NFTA_FIB_FLAGS)
	for i, name := range []string{"saddr", "daddr", "mark", "iif", "oif"} {
		if flags&(1<<i) != 0 {
			keys = append(keys, name)
		}
	}
	text := "fib " + strings.Join(keys, " . ")
	v := &value{size: 4, kind: routeTypes, text: text + " type"}
	switch a.u32(unix.NFTA_FIB_RESULT) {
	case unix.NFT_FIB_RESULT_OIF:
		v.text, v.kind = text+" oif", indexes
	case unix.NFT_FIB_RESULT_OIFNAME:
		v.text, v.kind, v.size = text+" oifname", devices, unix.IFNAMSIZ
	}
	if flags&unix.NFTA_FIB_F_PRESENT != 0 {
		v.kind, v.size = presence, 1
	}
	p.put(a.u32(unix.NFTA_FIB_DREG), v)
}

// random loads a number that does not depend on the packet.
func (p *printer) random(a attributes) {
	text := fmt.Sprintf("numgen %s mod %d", [...]string{"inc", "random"}[a.u32(unix.NFTA_NG_TYPE)&1], a.u32(unix.NFTA_NG_MODULUS))
	p.put(a.u32(unix.NFTA_NG_DREG), &value{text: text + offset(a.u32(unix.NFTA_NG_OFFSET)), kind: integers, size: 4})
}

// hash loads a number that depends on the packet.
func (p *printer) hash(a attributes) {
	text := "symhash"
	if a.u32(unix.NFTA_HASH_TYPE) == 0 {
		keys := p.keys(a.u32(unix.NFTA_HASH_SREG), &Set{KeySize: int(a.u32(unix.NFTA_HASH_LEN))})
		text = "jhash " + p.textOf(keys)
	}
	text += fmt.Sprintf(" mod %d", a.u32(unix.NFTA_HASH_MODULUS))
	if a.get(unix.NFTA_HASH_SEED) != nil {
		text += fmt.Sprintf(" seed 0x%x", a.u32(unix.NFTA_HASH_SEED))
	}
	p.put(a.u32(unix.NFTA_HASH_DREG), &value{text: text + offset(a.u32(unix.NFTA_HASH_OFFSET)), kind: integers, size: 4})
}

func offset(n uint32) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" offset %d", n)
}
