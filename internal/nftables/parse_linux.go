package nftables

import (
	"encoding/binary"
	"iter"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"golang.org/x/sys/unix"
)

// header is one parsed netlink message.
type header struct {
	typ, flags uint16
	seq        uint32
	body       []byte
}

// nextMessage returns the first message of b, which holds at least a header. An invalid
// length ends the buffer.
func nextMessage(b []byte) (m header, rest []byte) {
	n := int(binary.NativeEndian.Uint32(b))
	if n < nlmsgHeaderLen || n > len(b) {
		n = len(b)
	}
	m = header{
		typ:   binary.NativeEndian.Uint16(b[4:]),
		flags: binary.NativeEndian.Uint16(b[6:]),
		seq:   binary.NativeEndian.Uint32(b[8:]),
		body:  b[nlmsgHeaderLen:n],
	}
	return m, b[min(align4(n), len(b)):]
}

// messagesOf yields each message in b.
func messagesOf(b []byte) iter.Seq[header] {
	return func(yield func(header) bool) {
		for len(b) >= nlmsgHeaderLen {
			var m header
			m, b = nextMessage(b)
			if !yield(m) {
				return
			}
		}
	}
}

// errno is the result in an error or done message; 0 is success. Without a result it is EBADMSG.
func (m header) errno() int {
	if len(m.body) < 4 {
		return int(unix.EBADMSG)
	}
	return -int(int32(binary.NativeEndian.Uint32(m.body)))
}

// element is an element of a set in the kernel.
type element struct {
	key, keyEnd, data []byte
	chain             string // of a verdict
	jumps             bool   // to the chain; otherwise it goes there
	end               bool   // the exclusive end of an interval, not an element
	packets           uint64 // that its counter has counted
}

// elementsOf yields the elements in the attributes of a message.
func elementsOf(attrs []byte) iter.Seq[element] {
	return func(yield func(element) bool) {
		for _, item := range netlinkx.Attributes(netlinkx.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			if el := parseElement(item); el.key != nil && !yield(el) {
				return
			}
		}
	}
}

func parseElement(b []byte) element {
	var e element
	for typ, value := range netlinkx.Attributes(b) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.key = netlinkx.Find(value, unix.NFTA_DATA_VALUE)
		case elemKeyEnd:
			e.keyEnd = netlinkx.Find(value, unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_DATA:
			e.data = netlinkx.Find(value, unix.NFTA_DATA_VALUE)
			e.chain = netlinkx.String(netlinkx.Find(value, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN))
			e.jumps = int32(netlinkx.Uint32(netlinkx.Find(value, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CODE))) == unix.NFT_JUMP
		case unix.NFTA_SET_ELEM_EXPR:
			if n := netlinkx.Find(value, unix.NFTA_EXPR_DATA, unix.NFTA_COUNTER_PACKETS); len(n) == 8 {
				e.packets = binary.BigEndian.Uint64(n)
			}
		case unix.NFTA_SET_ELEM_FLAGS:
			e.end = len(value) == 4 && binary.BigEndian.Uint32(value)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		}
	}
	return e
}
