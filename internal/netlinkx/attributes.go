package netlinkx

import (
	"encoding/binary"
	"iter"
)

const (
	attrHeaderLen = 4
	attrTypeMask  = 0x3fff // NLA_TYPE_MASK of linux/netlink.h, which package unix lacks
)

// Attributes yields the type, without flags, and the value of each attribute in b. It stops
// at the first malformed attribute.
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

// Values yields the value of each attribute in b.
func Values(b []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for _, value := range Attributes(b) {
			if !yield(value) {
				return
			}
		}
	}
}

// Find returns the value at a path of nested attributes, nil if it is missing.
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

// String decodes a string attribute, with or without the terminating NUL.
func String(b []byte) string {
	if n := len(b); n > 0 && b[n-1] == 0 {
		return string(b[:n-1])
	}
	return string(b)
}

// Uint64 decodes a number in network byte order. It returns 0 if b has another length.
func Uint64(b []byte) uint64 {
	if len(b) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

// Uint32 decodes a number in network byte order. It returns 0 if b has another length.
func Uint32(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}
