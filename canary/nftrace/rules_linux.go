package nftrace

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	chainOutput      = "output"
	chainPostrouting = "postrouting"
	// first and last are priorities before and after those of all other programs.
	first, last = -1000, 1000
	// flagOwner is NFT_TABLE_F_OWNER of linux/netfilter/nf_tables.h, since Linux 5.12.
	flagOwner = 2
	// Offsets of linux/ip.h, linux/ipv6.h and linux/tcp.h.
	sourcePort, destinationPort = 0, 2
)

func (t *traced) family() byte {
	if t.VIP.Addr().Is4() {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

// messages is the transaction: packets to the VIP are traced, and those of the endpoint.
func (t *traced) messages() ([]netlink.Message, error) {
	addressAt := headerOf(t.VIP.Addr())
	toVIP := match(addressAt.destination, destinationPort, t.VIP)
	fromEndpoint := match(addressAt.source, sourcePort, t.Endpoint)
	list := []netlink.Message{
		marker(unix.NFNL_MSG_BATCH_BEGIN),
		t.message(unix.NFT_MSG_NEWTABLE, netlink.Acknowledge, func(ae *netlink.AttributeEncoder) {
			ae.String(unix.NFTA_TABLE_NAME, t.table)
			ae.Uint32(unix.NFTA_TABLE_FLAGS, flagOwner)
		}),
		t.chain(chainOutput, unix.NF_INET_LOCAL_OUT, first),
		t.chain(chainPostrouting, unix.NF_INET_POST_ROUTING, last),
	}
	for _, exprs := range [][]expr.Any{toVIP, fromEndpoint} {
		m, err := t.rule(exprs)
		if err != nil {
			return nil, err
		}
		list = append(list, m)
	}
	return append(list, marker(unix.NFNL_MSG_BATCH_END)), nil
}

// header has the offsets of the addresses in the header of an IP packet.
type header struct{ source, destination uint32 }

func headerOf(a netip.Addr) header {
	if a.Is4() {
		return header{12, 16}
	}
	return header{8, 24}
}

// match traces the TCP packets with an address and port.
func match(addressAt, portAt uint32, a netip.AddrPort) []expr.Any {
	const r = 1
	address := a.Addr().AsSlice()
	return []expr.Any{
		&expr.Payload{DestRegister: r, Base: expr.PayloadBaseNetworkHeader, Offset: addressAt, Len: uint32(len(address))},
		&expr.Cmp{Op: expr.CmpOpEq, Register: r, Data: address},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: r},
		&expr.Cmp{Op: expr.CmpOpEq, Register: r, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: r, Base: expr.PayloadBaseTransportHeader, Offset: portAt, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: r, Data: binary.BigEndian.AppendUint16(nil, a.Port())},
		&expr.Immediate{Register: r, Data: []byte{1}},
		&expr.Meta{Key: expr.MetaKeyNFTRACE, SourceRegister: true, Register: r},
	}
}

func (t *traced) chain(name string, hook, priority int) netlink.Message {
	return t.message(unix.NFT_MSG_NEWCHAIN, 0, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_CHAIN_TABLE, t.table)
		ae.String(unix.NFTA_CHAIN_NAME, name)
		ae.String(unix.NFTA_CHAIN_TYPE, "filter")
		ae.Nested(unix.NFTA_CHAIN_HOOK, func(ae *netlink.AttributeEncoder) error {
			ae.ByteOrder = binary.BigEndian
			ae.Uint32(unix.NFTA_HOOK_HOOKNUM, uint32(hook))
			ae.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(int32(priority)))
			return nil
		})
	})
}

func (t *traced) rule(exprs []expr.Any) (netlink.Message, error) {
	var encoded [][]byte
	for _, e := range exprs {
		b, err := expr.Marshal(t.family(), e)
		if err != nil {
			return netlink.Message{}, fmt.Errorf("encode rule: %w", err)
		}
		encoded = append(encoded, b)
	}
	return t.message(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_RULE_TABLE, t.table)
		ae.String(unix.NFTA_RULE_CHAIN, chainOutput)
		ae.Nested(unix.NFTA_RULE_EXPRESSIONS, func(ae *netlink.AttributeEncoder) error {
			for _, b := range encoded {
				ae.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b)
			}
			return nil
		})
	}), nil
}

// message is a request about nf_tables. Numbers are in network byte order.
func (t *traced) message(typ uint16, flags netlink.HeaderFlags, write func(*netlink.AttributeEncoder)) netlink.Message {
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	write(ae)
	data, _ := ae.Encode() // no value is too long
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | typ), Flags: netlink.Request | netlink.Create | flags},
		Data:   append([]byte{t.family(), 0, 0, 0}, data...),
	}
}

// marker is the begin or the end of a transaction.
func marker(typ netlink.HeaderType) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: typ, Flags: netlink.Request},
		Data:   binary.BigEndian.AppendUint16([]byte{unix.AF_UNSPEC, 0}, unix.NFNL_SUBSYS_NFTABLES),
	}
}
