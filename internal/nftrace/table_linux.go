package nftrace

import (
	"context"
	"encoding/binary"
	"math"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nft"
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

// transact sends a transaction about the table.
func (t *table) transact(conn *nft.Conn, write func(b *nft.Batch)) error {
	b := &nft.Batch{Family: t.family, Table: t.name}
	b.Begin()
	write(b)
	b.Finish()
	return conn.Commit(context.Background(), b) //nolint:forbidigo // it ends soon
}

// install creates the table in one transaction, with the flag that the kernel deletes it with
// the socket if the kernel knows it.
func (t *table) install(conn *nft.Conn, flags uint32) error {
	rules := make([][][]byte, len(t.matches))
	for i := range t.matches {
		var err error
		if rules[i], err = nft.Encode(t.family, t.marking(&t.matches[i])...); err != nil {
			return err
		}
	}
	return t.transact(conn, func(b *nft.Batch) {
		b.NewTable(flags, nil)
		for number, hook := range hooks {
			b.NewChain(hook+suffixBegin, &nft.Hook{Kind: "filter", Number: uint32(number), Priority: first}, nil)
			b.NewChain(hook+suffixEnd, &nft.Hook{Kind: "filter", Number: uint32(number), Priority: last}, nil)
		}
		for i := range t.matches {
			if t.matches[i].Origin != desired.FromNode {
				b.NewRule("prerouting"+suffixBegin, rules[i], nil)
			}
			if t.matches[i].Origin == desired.FromNode || t.matches[i].Origin == 0 {
				b.NewRule("output"+suffixBegin, rules[i], nil)
			}
		}
	})
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
