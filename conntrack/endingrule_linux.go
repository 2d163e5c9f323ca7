package conntrack

import (
	"encoding/binary"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
)

// Keys of ct (linux/netfilter/nf_tables.h).
const (
	ctSourceIP  = unix.NFT_CT_SRC_IP
	ctSourceIP6 = unix.NFT_CT_SRC_IP6
	ctID        = expr.CtKey(unix.NFT_CT_ID)
)

// ruleOf is "tcp flags & (syn | rst) == 0 ct direction . ct id . ct reply saddr . ct reply
// proto-src @connections reject with tcp reset", encoded. A packet with SYN provokes, or
// begins a new connection.
func (t *endingTable) ruleOf(set *nftables.Set) ([]byte, error) {
	addrKey, port := uint32(ctSourceIP), uint32(firstRegister+3)
	if t.family == v1.IPv6Protocol {
		addrKey, port = ctSourceIP6, firstRegister+6
	}
	exprs := []any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: firstRegister},
		&expr.Cmp{Op: expr.CmpOpEq, Register: firstRegister, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: firstRegister, Base: expr.PayloadBaseTransportHeader, Offset: flagsOffset, Len: 1},
		&expr.Bitwise{SourceRegister: firstRegister, DestRegister: firstRegister, Len: 1, Mask: []byte{flagSYN | flagRST}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: firstRegister, Data: []byte{0}},
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: firstRegister},
		&expr.Ct{Key: ctID, Register: firstRegister + 1},
		replySource{addrKey, firstRegister + 2},
		replySource{uint32(expr.CtKeyPROTOSRC), port},
		&expr.Lookup{SourceRegister: firstRegister, SetName: set.Name},
		&expr.Reject{Type: unix.NFT_REJECT_TCP_RST},
	}
	encoder := netlink.NewAttributeEncoder()
	for _, e := range exprs {
		var encoded []byte
		var err error
		if source, ok := e.(replySource); ok {
			encoded, err = source.encode()
		} else {
			encoded, err = expr.Marshal(byte(set.Table.Family), e.(expr.Any))
		}
		if err != nil {
			return nil, fmt.Errorf("encode rule: %w", err)
		}
		encoder.Bytes(unix.NLA_F_NESTED|unix.NFTA_LIST_ELEM, encoded)
	}
	return encoder.Encode()
}

// replySource loads a key of ct in the reply direction. Type expr.Ct has no directions for some
// keys, and encodes directions with a length that makes the kernel log a warning.
type replySource struct{ key, register uint32 }

func (s replySource) encode() ([]byte, error) {
	e := netlink.NewAttributeEncoder()
	e.String(unix.NFTA_EXPR_NAME, "ct")
	e.Nested(unix.NFTA_EXPR_DATA, func(e *netlink.AttributeEncoder) error {
		e.ByteOrder = binary.BigEndian
		e.Uint32(unix.NFTA_CT_KEY, s.key)
		e.Uint32(unix.NFTA_CT_DREG, s.register)
		e.Uint8(unix.NFTA_CT_DIRECTION, reply)
		return nil
	})
	return e.Encode()
}

// addRules adds the rule to these chains, in one transaction.
func (t *endingTable) addRules(set *nftables.Set, chains []string) error {
	encoded, err := t.ruleOf(set)
	if err != nil {
		return err
	}
	messages := []netlink.Message{batch(unix.NFNL_MSG_BATCH_BEGIN)}
	for _, chain := range chains {
		e := netlink.NewAttributeEncoder()
		e.String(unix.NFTA_RULE_TABLE, set.Table.Name)
		e.String(unix.NFTA_RULE_CHAIN, chain)
		e.Bytes(unix.NLA_F_NESTED|unix.NFTA_RULE_EXPRESSIONS, encoded)
		attrs, err := e.Encode()
		if err != nil {
			return fmt.Errorf("encode rule: %w", err)
		}
		messages = append(messages, netlink.Message{
			Header: netlink.Header{
				Type:  unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE,
				Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Append,
			},
			Data: append([]byte{byte(set.Table.Family), 0, 0, 0}, attrs...),
		})
	}
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return unsupported(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := conn.SendMessages(append(messages, batch(unix.NFNL_MSG_BATCH_END))); err != nil {
		return unsupported(err)
	}
	for range chains {
		if _, err := conn.Receive(); err != nil {
			return unsupported(err)
		}
	}
	return nil
}

func batch(marker uint16) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(marker), Flags: netlink.Request},
		Data:   []byte{unix.AF_UNSPEC, 0, 0, unix.NFNL_SUBSYS_NFTABLES},
	}
}
