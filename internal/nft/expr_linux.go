package nft

import (
	"fmt"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Reg is the nth of the kernel's sixteen registers of 4 bytes, NFT_REG32_00 and up. An IPv6 address takes four in
// a row.
func Reg(n int) uint32 { return uint32(8 + n) }

// Tracked loads what connection tracking knows of one direction. The library writes directions as numbers
// of 4 bytes, in which the kernel reads the first, or not at all.
type Tracked struct{ *expr.Ct }

// Keys of linux/netfilter/nf_tables.h that the library does not name.
const (
	SourceIPv4      expr.CtKey = unix.NFT_CT_SRC_IP
	DestinationIPv4 expr.CtKey = unix.NFT_CT_DST_IP
	SourceIPv6      expr.CtKey = unix.NFT_CT_SRC_IP6
	DestinationIPv6 expr.CtKey = unix.NFT_CT_DST_IP6
)

func (t Tracked) encode() []byte {
	var b Batch
	b.Text(unix.NFTA_EXPR_NAME, "ct")
	b.Nest(unix.NFTA_EXPR_DATA, func() {
		b.Uint32(unix.NFTA_CT_KEY, uint32(t.Key))
		b.Uint32(unix.NFTA_CT_DREG, t.Register)
		b.Attr(unix.NFTA_CT_DIRECTION, []byte{uint8(t.Direction)})
	})
	return b.Buf
}

// Encode encodes expressions for NewRule.
func Encode(family uint8, exprs ...expr.Any) (encoded [][]byte, err error) {
	for _, e := range exprs {
		var b []byte
		if t, ok := e.(Tracked); ok {
			b = t.encode()
		} else if b, err = expr.Marshal(family, e); err != nil {
			return nil, fmt.Errorf("encode expression %T: %w", e, err)
		}
		encoded = append(encoded, b)
	}
	return encoded, nil
}
