package netlinkx

import (
	"encoding/binary"
	"iter"
)

const (
	attrHeaderLen = 4
	attrTypeMask  = 0x3fff // NLA_TYPE_MASK of linux/netlink.h
)

// Attributes yields type, without flags, and value of each attribute in b. Bytes
// that make no attribute end it.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= attrHeaderLen {
			n := int(binary.NativeEndian.Uint16(b))
			if n < attrHeaderLen || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&attrTypeMask, b[attrHeaderLen:n]) {
				return
			}
			b = b[min((n+3)&^3, len(b)):]
		}
	}
}

// Find returns the value at a path of nested attributes, nil if there is none.
func Find(b []byte, path ...uint16) []byte {
	for _, want := range path {
		var found []byte
		for typ, value := range Attributes(b) {
			if typ == want {
				found = value
				break
			}
		}
		if found == nil {
			return nil
		}
		b = found
	}
	return b
}
