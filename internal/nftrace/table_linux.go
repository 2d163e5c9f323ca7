package nftrace

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nftext"
)

const (
	// first and last are priorities before and after those of all other programs. Connection
	// tracking confirms a connection at math.MaxInt32.
	first, last = math.MinInt32 + 1, math.MaxInt32 - 1
	// flagOwner is NFT_TABLE_F_OWNER of linux/netfilter/nf_tables.h, since Linux 5.12.
	flagOwner = 2
	// Offsets of linux/tcp.h.
	sourcePort, destinationPort, tcpFlags = 0, 2, 13
	// Flags of the TCP header.
	fin, syn, rst, ack = 1, 2, 4, 16
)

// hooks are all hooks of the IP families, by number.
var hooks = map[int]string{ // read-only
	unix.NF_INET_PRE_ROUTING:  "prerouting",
	unix.NF_INET_LOCAL_IN:     "input",
	unix.NF_INET_FORWARD:      "forward",
	unix.NF_INET_LOCAL_OUT:    "output",
	unix.NF_INET_POST_ROUTING: "postrouting",
}

// table is the table of one trace.
type table struct {
	name    string
	family  byte
	bits    int // of an address
	limit   int
	matches []Match
}

// install creates the table in one transaction, with the flag that the kernel deletes it with
// the socket if the kernel knows it.
func (t *table) install(conn *netlinkx.Conn, flags uint32) error {
	messages, err := t.messages(flags)
	if err != nil {
		return err
	}
	if err := transact(conn, messages...); err != nil {
		return fmt.Errorf("create table %s: %w", t.name, err)
	}
	return nil
}

// transact sends a transaction, and returns its first error. The last message is acknowledged.
func transact(conn *netlinkx.Conn, messages ...[]byte) error {
	last := messages[len(messages)-1]
	binary.NativeEndian.PutUint16(last[6:], binary.NativeEndian.Uint16(last[6:])|unix.NLM_F_ACK)
	request := slices.Concat(marker(unix.NFNL_MSG_BATCH_BEGIN), slices.Concat(messages...), marker(unix.NFNL_MSG_BATCH_END))
	_, err := conn.AskAll(request)
	return err
}

func (t *table) messages(flags uint32) ([][]byte, error) {
	list := [][]byte{t.message(unix.NFT_MSG_NEWTABLE, 0, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_TABLE_NAME, t.name)
		ae.Uint32(unix.NFTA_TABLE_FLAGS, flags)
	})}
	for number, hook := range hooks {
		list = append(list, t.chain(hook+suffixBegin, number, first), t.chain(hook+suffixEnd, number, last))
	}
	for i := range t.matches {
		for chain, wanted := range map[string]bool{
			"prerouting" + suffixBegin: t.matches[i].Origin != desired.FromNode,
			"output" + suffixBegin:     t.matches[i].Origin == desired.FromNode || t.matches[i].Origin == 0,
		} {
			if !wanted {
				continue
			}
			m, err := t.rule(chain, t.marking(&t.matches[i]))
			if err != nil {
				return nil, err
			}
			list = append(list, m)
		}
	}
	return list, nil
}

// deletion deletes a table.
func (t *table) deletion() []byte {
	return request(unix.NFT_MSG_DELTABLE, t.family, 0, func(ae *netlink.AttributeEncoder) { ae.String(unix.NFTA_TABLE_NAME, t.name) })
}

// register is the one that the rules use.
const register = 1

// marking sets nftrace for the packets of a Match, up to the limit.
func (t *table) marking(m *Match) (list []expr.Any) {
	at := nftext.HeaderOf(t.bits)
	equal := func(data []byte) { list = append(list, &expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: data}) }
	load := func(base expr.PayloadBase, offset, size uint32) {
		list = append(list, &expr.Payload{DestRegister: register, Base: base, Offset: offset, Len: size})
	}
	if a := m.Source.Addr(); a.IsValid() {
		load(expr.PayloadBaseNetworkHeader, at.Source, at.Size)
		equal(a.AsSlice())
	}
	if a := m.Destination.Addr(); a.IsValid() {
		load(expr.PayloadBaseNetworkHeader, at.Destination, at.Size)
		equal(a.AsSlice())
	}
	list = append(list, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register})
	equal([]byte{byte(m.Protocol)})
	for offset, port := range map[uint32]uint16{sourcePort: m.Source.Port(), destinationPort: m.Destination.Port()} {
		if port != 0 {
			load(expr.PayloadBaseTransportHeader, offset, 2)
			equal(binary.BigEndian.AppendUint16(nil, port))
		}
	}
	if m.Opening && m.Protocol == desired.TCP {
		load(expr.PayloadBaseTransportHeader, tcpFlags, 1)
		list = append(list, &expr.Bitwise{SourceRegister: register, DestRegister: register, Len: 1, Mask: []byte{fin | syn | rst | ack}, Xor: []byte{0}})
		equal([]byte{syn})
	}
	return append(list,
		&expr.Limit{Type: expr.LimitTypePkts, Rate: 1, Unit: expr.LimitTimeWeek, Burst: uint32(t.limit)}, // only the burst matters
		&expr.Immediate{Register: register, Data: []byte{1}},
		&expr.Meta{Key: expr.MetaKeyNFTRACE, SourceRegister: true, Register: register},
	)
}

func (t *table) chain(name string, hook, priority int) []byte {
	return t.message(unix.NFT_MSG_NEWCHAIN, 0, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_CHAIN_TABLE, t.name)
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

func (t *table) rule(chain string, exprs []expr.Any) ([]byte, error) {
	var encoded [][]byte
	for _, e := range exprs {
		b, err := expr.Marshal(t.family, e)
		if err != nil {
			return nil, fmt.Errorf("encode rule: %w", err)
		}
		encoded = append(encoded, b)
	}
	return t.message(unix.NFT_MSG_NEWRULE, unix.NLM_F_APPEND, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_RULE_TABLE, t.name)
		ae.String(unix.NFTA_RULE_CHAIN, chain)
		ae.Nested(unix.NFTA_RULE_EXPRESSIONS, func(ae *netlink.AttributeEncoder) error {
			for _, b := range encoded {
				ae.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b)
			}
			return nil
		})
	}), nil
}

func (t *table) message(typ, flags uint16, write func(*netlink.AttributeEncoder)) []byte {
	return request(typ, t.family, unix.NLM_F_CREATE|flags, write)
}

// request is a message about nf_tables. Numbers are in network byte order.
func request(typ uint16, family byte, flags uint16, write func(*netlink.AttributeEncoder)) []byte {
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	write(ae)
	data, _ := ae.Encode() // no value is too long
	return netlinkx.Request(unix.NFNL_SUBSYS_NFTABLES<<8|typ, flags, family, data...)
}

// marker is the begin or the end of a transaction. Its struct nfgenmsg ends with the subsystem.
func marker(typ uint16) []byte {
	m := netlinkx.Request(typ, 0, unix.AF_UNSPEC)
	m[len(m)-1] = unix.NFNL_SUBSYS_NFTABLES
	return m
}
