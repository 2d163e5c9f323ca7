package nftables

import (
	"encoding/binary"
	"iter"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"golang.org/x/sys/unix"
)

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
