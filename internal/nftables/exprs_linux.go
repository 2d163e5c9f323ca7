package nftables

import (
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Numbers of the kernel's headers that package unix does not have.
const (
	dynsetDelete   = 2    // NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h
	ctStatusDNAT   = 0x20 // IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h
	ctStateInvalid = 0x01 // NF_CT_STATE_INVALID_BIT of net/netfilter/nf_conntrack.h
	portICMP       = 3    // ICMP_PORT_UNREACH of linux/icmp.h
	portICMPv6     = 4    // ICMPV6_PORT_UNREACH of linux/icmpv6.h
)

// reg is the nth of the kernel's sixteen registers of 4 bytes, NFT_REG32_00 and
// up. An IPv6 address takes four in a row.
func reg(n int) uint32 { return uint32(8 + n) }

func (r *rules) addrRegs() int {
	if r.v6 {
		return 4
	}
	return 1
}

// tupleLen is the number of registers that tuple fills.
func (r *rules) tupleLen() int { return r.addrRegs() + 2 }

// tuple loads destination address, protocol and port from register 0 on.
func (r *rules) tuple() rule {
	n := r.addrRegs()
	return rule{r.daddr(0), l4proto(n), dport(n + 1)}
}

func (r *rules) tupleAndIndex() rule { return append(r.tuple(), priority(r.tupleLen())) }

// nodePort loads protocol and port from register 0 on.
func nodePort() rule { return rule{l4proto(0), dport(1)} }

func nodePortAndIndex() rule { return append(nodePort(), priority(2)) }

func (r *rules) daddr(n int) expr.Any {
	if r.v6 {
		return &expr.Payload{DestRegister: reg(n), Base: expr.PayloadBaseNetworkHeader, Offset: 24, Len: 16}
	}
	return &expr.Payload{DestRegister: reg(n), Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}
}

func (r *rules) saddr(n int) expr.Any {
	if r.v6 {
		return &expr.Payload{DestRegister: reg(n), Base: expr.PayloadBaseNetworkHeader, Offset: 8, Len: 16}
	}
	return &expr.Payload{DestRegister: reg(n), Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}
}

// daddrType loads the kind of route to the destination address, RTN_*.
func daddrType(n int) expr.Any {
	return &expr.Fib{Register: reg(n), ResultADDRTYPE: true, FlagDADDR: true}
}

func l4proto(n int) expr.Any { return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg(n)} }

func dport(n int) expr.Any {
	return &expr.Payload{DestRegister: reg(n), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

// noSYN accepts packets of TCP without SYN.
func noSYN() rule {
	const flags, syn = 13, 0x02 // of struct tcphdr
	return rule{
		l4proto(0), &expr.Cmp{Op: expr.CmpOpEq, Register: reg(0), Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: reg(0), Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1},
		&expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: 1, Mask: []byte{syn}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg(0), Data: []byte{0}},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}
}

func sport(n int) expr.Any {
	return &expr.Payload{DestRegister: reg(n), Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2}
}

func priority(n int) expr.Any { return &expr.Meta{Key: expr.MetaKeyPRIORITY, Register: reg(n)} }

func setPriority(from uint32) expr.Any {
	return &expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: from}
}

func resetPriority() rule {
	return rule{&expr.Immediate{Register: reg(0), Data: nativeUint32(0)}, setPriority(reg(0))}
}

// carry looks up a key and leaves the result in skb->priority for the next rule. If the
// key is missing, it changes nothing. The lookups are in separate rules because nft 1.0.6
// cannot print a lookup whose key is the result of another lookup of the same rule.
func carry(key rule, in setID) rule {
	return append(key, lookup(in, reg(0), reg(0)), setPriority(reg(0)))
}

// dispatch goes to the chain of the class in skb->priority. A priority that the sender
// has set is in no verdict map.
func dispatch(classes setID) rule {
	return rule{priority(0), lookupVerdict(classes, reg(0))}
}

// refuse goes to a chain that refuses the addresses of a set. With elsewhere, the node's
// own addresses are excepted: the node itself handles those packets (PKT-14).
func (r *rules) refuse(in setID, chain string, elsewhere bool) rule {
	match := rule{r.daddr(0), lookupSet(in, reg(0))}
	if elsewhere {
		match = append(match, daddrType(0), &expr.Cmp{Op: expr.CmpOpNeq, Register: reg(0), Data: nativeUint32(unix.RTN_LOCAL)})
	}
	return append(match, gotoChain(chain))
}

// dnat translates the destination to the value of a key in a map, and resets skb->priority.
// If connections are counted, a rule before it does so and counts. That rule does nothing if
// the set of counters is full, because a failed write ends a rule.
func (r *rules) dnat(key rule, in setID) []rule {
	family, port := uint32(unix.NFPROTO_IPV4), reg(9)
	if r.v6 {
		family, port = unix.NFPROTO_IPV6, reg(12)
	}
	find := append(key, lookup(in, reg(0), reg(8)))
	translate := append(resetPriority(), &expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: reg(8), RegProtoMin: port})
	plain := slices.Concat(find, translate)
	if !r.counts {
		return []rule{plain}
	}
	counters, _ := countersOf(in)
	return []rule{slices.Concat(find, rule{count(counters)}, translate), plain}
}

// count adds one to the counter of the key from register 0 on.
func count(counters setID) expr.Any {
	return &expr.Dynset{
		SrcRegKey: reg(0), SetName: setName(counters), Operation: unix.NFT_DYNSET_OP_ADD, Exprs: []expr.Any{&expr.Counter{}},
	}
}

// fromPod matches pod traffic with op CmpOpEq, all other traffic with CmpOpNeq.
func (r *rules) fromPod(op expr.CmpOp) rule {
	if r.podInterface == "" {
		return rule{r.saddr(0), &expr.Lookup{SourceRegister: reg(0), SetName: setName(setPodCIDRs), Invert: op == expr.CmpOpNeq}}
	}
	name, prefix := strings.CutSuffix(r.podInterface, "*")
	data := []byte(name)
	if !prefix {
		data = make([]byte, unix.IFNAMSIZ) // the terminating zeros make the match exact
		copy(data, name)
	}
	return rule{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg(0)},
		&expr.Cmp{Op: op, Register: reg(0), Data: data},
	}
}

func (r *rules) setMark() rule {
	return rule{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg(0)}, or(0, r.mark),
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg(0)},
	}
}

// reject refuses clients at once. A TCP client over IPv6 hears an ICMP error only after a second, when
// it sends its SYN again: the kernel drops one that comes while connect holds the socket (tcp_v6_err).
func (r *rules) reject() []rule {
	code := uint8(portICMP)
	if r.v6 {
		code = portICMPv6
	}
	return []rule{
		{l4proto(0), &expr.Cmp{Op: expr.CmpOpEq, Register: reg(0), Data: []byte{unix.IPPROTO_TCP}}, &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}},
		{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code}},
	}
}

func jump(chain string) rule { return rule{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}} }

func gotoChain(chain string) expr.Any { return &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain} }

func lookup(in setID, from, to uint32) expr.Any {
	return &expr.Lookup{SourceRegister: from, DestRegister: to, IsDestRegSet: true, SetName: setName(in)}
}

func lookupVerdict(in setID, from uint32) expr.Any {
	return &expr.Lookup{SourceRegister: from, IsDestRegSet: true, SetName: setName(in)}
}

func lookupSet(in setID, from uint32) expr.Any {
	return &expr.Lookup{SourceRegister: from, SetName: setName(in)}
}

func lookupNotInSet(in setID, from uint32) expr.Any {
	return &expr.Lookup{SourceRegister: from, SetName: setName(in), Invert: true}
}

// and computes register to = register from & mask.
func and(to, from int, mask uint32) expr.Any {
	return &expr.Bitwise{SourceRegister: reg(from), DestRegister: reg(to), Len: 4, Mask: nativeUint32(mask), Xor: nativeUint32(0)}
}

// or computes register n |= bits, in the kernel's terms (n & ^bits) ^ bits.
func or(n int, bits uint32) expr.Any {
	return &expr.Bitwise{SourceRegister: reg(n), DestRegister: reg(n), Len: 4, Mask: nativeUint32(^bits), Xor: nativeUint32(bits)}
}

func notZero(n int) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpNeq, Register: reg(n), Data: nativeUint32(0)}
}

// notInPrefix matches an address in register n outside a prefix.
func notInPrefix(n uint32, p netip.Prefix) []expr.Any {
	outside := &expr.Cmp{Op: expr.CmpOpNeq, Register: n, Data: p.Addr().AsSlice()}
	if p.IsSingleIP() {
		return []expr.Any{outside}
	}
	size := p.Addr().BitLen() / 8
	mask := net.CIDRMask(p.Bits(), 8*size)
	return []expr.Any{
		&expr.Bitwise{SourceRegister: n, DestRegister: n, Len: uint32(size), Mask: mask, Xor: make([]byte, size)},
		outside,
	}
}
