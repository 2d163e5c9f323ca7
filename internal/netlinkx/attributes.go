package netlinkx

import (
	"encoding/binary"
	"fmt"
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

// String is a string attribute, without the zero that ends it.
func String(b []byte) string {
	if n := len(b); n > 0 && b[n-1] == 0 {
		return string(b[:n-1])
	}
	return string(b)
}

// Uint32 is a number in network byte order, 0 if b has another length.
func Uint32(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// Attributes of the message that ends a transaction of nf_tables, NFTA_GEN_* of
// linux/netfilter/nf_tables.h.
const (
	genProcess = 2
	genProgram = 3
)

// Author names the process that committed a transaction of nf_tables, given the
// attributes of the message that ends it.
func Author(attrs []byte) string {
	program, process := String(Find(attrs, genProgram)), Uint32(Find(attrs, genProcess))
	if process == 0 {
		return program
	}
	return fmt.Sprintf("%s (process %d)", program, process)
}
