package nftables

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/google/nftables/expr"
)

// Numbers of the kernel's headers that the expr package leaves to its users.
const (
	rtnLocal     = 2    // RTN_LOCAL of linux/rtnetlink.h
	ngRandom     = 1    // NFT_NG_RANDOM of linux/netfilter/nf_tables.h
	dynsetAdd    = 0    // NFT_DYNSET_OP_ADD
	dynsetUpdate = 1    // NFT_DYNSET_OP_UPDATE
	dynsetDelete = 2    // NFT_DYNSET_OP_DELETE
	ctStatusDNAT = 0x20 // IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h
	rejectICMP   = 0    // NFT_REJECT_ICMP_UNREACH
	portICMP     = 3    // ICMP_PORT_UNREACH of linux/icmp.h
	portICMPv6   = 4    // ICMPV6_PORT_UNREACH of linux/icmpv6.h
	familyIPv4   = 2    // NFPROTO_IPV4 of linux/netfilter.h
	familyIPv6   = 10   // NFPROTO_IPV6
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
func (r *rules) tuple() []expr.Any {
	n := r.addrRegs()
	return []expr.Any{r.daddr(0), l4proto(n), dport(n + 1)}
}

// nodePort loads protocol and port from register 0 on.
func (r *rules) nodePort() []expr.Any { return []expr.Any{l4proto(0), dport(1)} }

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

func l4proto(n int) expr.Any { return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg(n)} }

func dport(n int) expr.Any {
	return &expr.Payload{DestRegister: reg(n), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

func priority(n int) expr.Any { return &expr.Meta{Key: expr.MetaKeyPRIORITY, Register: reg(n)} }

func setPriority(from uint32) expr.Any {
	return &expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: from}
}

// carry looks up a key and leaves the result in skb->priority for the next rule;
// a key that is not there leaves everything as it was. The rule in between is
// what lets nft 1.0.6 print the table: it cannot print a lookup whose key comes
// from another lookup of the same rule.
func (r *rules) carry(key string, load func() []expr.Any, in setID) ruleSpec {
	return ruleSpec{
		text:  "meta priority set " + r.expand(key) + " map @" + setName(in),
		exprs: append(load(), lookup(in, reg(0), reg(0)), setPriority(reg(0))),
	}
}

// expand puts the family's keyword into a text that asks for it.
func (r *rules) expand(text string) string {
	if strings.Contains(text, "%s") {
		return fmt.Sprintf(text, r.ip())
	}
	return text
}

// dispatch goes to the chain of the class in skb->priority. Whatever else a
// sender may have put there is in no verdict map.
func (r *rules) dispatch(classes setID) ruleSpec {
	return ruleSpec{
		text:  "meta priority vmap @" + setName(classes),
		exprs: []expr.Any{priority(0), &expr.Lookup{SourceRegister: reg(0), SetName: setName(classes), IsDestRegSet: true}},
	}
}

// refuse goes to a chain for what no Service wants, unless, on request, the address is
// the node's own: then it is for the node (PKT-14).
func (r *rules) refuse(in setID, chain string, elsewhere bool) ruleSpec {
	spec := ruleSpec{
		text:  fmt.Sprintf("%s daddr @%s", r.ip(), setName(in)),
		exprs: []expr.Any{r.daddr(0), lookupSet(in, reg(0))},
	}
	if elsewhere {
		spec = spec.then("fib daddr type != local",
			&expr.Fib{Register: reg(0), ResultADDRTYPE: true, FlagDADDR: true},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: reg(0), Data: nativeUint32(rtnLocal)})
	}
	return spec.then("goto "+chain, gotoChain(chain))
}

// dnat translates the destination to what the map holds for the key, and resets
// skb->priority on the way.
func (r *rules) dnat(key string, load []expr.Any, in setID) ruleSpec {
	family, port := uint32(familyIPv4), reg(9)
	if r.v6 {
		family, port = familyIPv6, reg(12)
	}
	return ruleSpec{
		text: fmt.Sprintf("meta priority set 0 dnat %s to %s map @%s", r.ip(), r.expand(key), setName(in)),
		exprs: append(load, lookup(in, reg(0), reg(8)),
			&expr.Immediate{Register: reg(0), Data: nativeUint32(0)}, setPriority(reg(0)),
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: reg(8), RegProtoMin: port}),
	}
}

// fromPod matches pod traffic with op CmpOpEq, all other traffic with CmpOpNeq.
func (r *rules) fromPod(op expr.CmpOp) (text string, match []expr.Any) {
	not := ""
	if op == expr.CmpOpNeq {
		not = "!= "
	}
	if r.podInterface == "" {
		return fmt.Sprintf("%s saddr %s@pod-cidrs", r.ip(), not), []expr.Any{
			r.saddr(0), &expr.Lookup{SourceRegister: reg(0), SetName: setName(setPodCIDRs), Invert: op == expr.CmpOpNeq},
		}
	}
	name, prefix := strings.CutSuffix(r.podInterface, "*")
	data := []byte(name)
	if !prefix {
		data = make([]byte, 16) // IFNAMSIZ: the terminating zeros make it exact
		copy(data, name)
	}
	return fmt.Sprintf("iifname %s%q", not, r.podInterface), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg(0)},
		&expr.Cmp{Op: op, Register: reg(0), Data: data},
	}
}

func (r *rules) setMark() (text string, exprs []expr.Any) {
	return fmt.Sprintf("meta mark set meta mark | %#x", r.mark), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg(0)}, or(0, r.mark),
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg(0)},
	}
}

func (r *rules) jump(chain string) ruleSpec {
	return ruleSpec{text: "jump " + chain, exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}}
}

func (r *rules) reject() ruleSpec {
	code := uint8(portICMP)
	if r.v6 {
		code = portICMPv6
	}
	return ruleSpec{text: "reject", exprs: []expr.Any{&expr.Reject{Type: rejectICMP, Code: code}}}
}

func (r *rules) drop() ruleSpec {
	return ruleSpec{text: "drop", exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}}
}

func gotoChain(chain string) expr.Any { return &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain} }

func lookup(in setID, from, to uint32) expr.Any {
	return &expr.Lookup{SourceRegister: from, DestRegister: to, IsDestRegSet: true, SetName: setName(in)}
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
func notInPrefix(n uint32, addr []byte, bits int) []expr.Any {
	if bits == 8*len(addr) {
		return []expr.Any{&expr.Cmp{Op: expr.CmpOpNeq, Register: n, Data: addr}}
	}
	mask := make([]byte, len(addr))
	for i := range bits / 8 {
		mask[i] = 0xff
	}
	return []expr.Any{
		&expr.Bitwise{SourceRegister: n, DestRegister: n, Len: uint32(len(addr)), Mask: mask, Xor: make([]byte, len(addr))},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: n, Data: addr},
	}
}

func nativeUint32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
