package nftext_test

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/nftext"
)

// expression encodes an expression.
func expression(t *testing.T, name string, data func(*netlink.AttributeEncoder)) []byte {
	t.Helper()
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	ae.String(unix.NFTA_EXPR_NAME, name)
	ae.Nested(unix.NFTA_EXPR_DATA, func(nested *netlink.AttributeEncoder) error {
		nested.ByteOrder = binary.BigEndian
		data(nested)
		return nil
	})
	b, err := ae.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func show(exprs ...[]byte) nftext.Rule {
	return nftext.Print(unix.NFPROTO_IPV4, slices.Values(exprs), func(string) *nftext.Set { return &nftext.Set{KeySize: 4} }, nil)
}

// TestAHeaderInsideTheTransport: whatever its offset and length are, it is a field without a name.
func TestAHeaderInsideTheTransport(t *testing.T) {
	t.Parallel()
	for base := range uint32(6) {
		for _, at := range [][2]uint32{{0, 6}, {6, 6}, {12, 2}, {0, 12}, {0, 14}, {3, 1}, {16, 4}} {
			load := expression(t, "payload", func(ae *netlink.AttributeEncoder) {
				ae.Uint32(unix.NFTA_PAYLOAD_DREG, unix.NFT_REG32_00)
				ae.Uint32(unix.NFTA_PAYLOAD_BASE, base)
				ae.Uint32(unix.NFTA_PAYLOAD_OFFSET, at[0])
				ae.Uint32(unix.NFTA_PAYLOAD_LEN, at[1])
			})
			if r := show(load); base >= 3 && !r.Unknown {
				t.Errorf("base %d, %v: %+v, want that it is not known", base, at, r)
			}
		}
	}
}

// The text of an element has all of its expressions.
func TestAnElementWithSeveralExpressions(t *testing.T) {
	t.Parallel()
	counter := expression(t, "counter", func(*netlink.AttributeEncoder) {})
	unknown := expression(t, "of-tomorrow", func(*netlink.AttributeEncoder) {})
	update := expression(t, "dynset", func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_DYNSET_SET_NAME, "s")
		ae.Uint32(unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_UPDATE)
		ae.Uint32(unix.NFTA_DYNSET_SREG_KEY, unix.NFT_REG32_00)
		ae.Nested(10, func(list *netlink.AttributeEncoder) error { // NFTA_DYNSET_EXPRESSIONS
			list.Bytes(unix.NFTA_LIST_ELEM, counter)
			list.Bytes(unix.NFTA_LIST_ELEM, unknown)
			return nil
		})
	})
	if r := show(update); r.Text != "update @s { ? counter of-tomorrow }" || !r.Unknown {
		t.Errorf("%+v, want both expressions, of which one is not known", r)
	}
}
