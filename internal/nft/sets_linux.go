package nft

import (
	"encoding/binary"
	"iter"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// Field is a part of the key or of the data of a set's elements.
type Field uint8

// The fields.
const (
	Addr Field = iota + 1
	Proto
	Port
	Mark
	Verdict
)

// Set is a set, or a map if it has data.
type Set struct {
	Name      string
	ID        uint32 // unique within a transaction, not 0
	Key, Data []Field
	Flags     uint32        // all of SetFlags
	Size      uint32        // maximum number of elements; 0 for sets that packets do not write
	Timeout   time.Duration // of elements
	Counter   bool          // each element counts packets
}

// Numbers of linux/netfilter/nf_tables.h that package unix does not have.
const (
	flagConcat  = 0x80 // NFT_SET_CONCAT
	descConcat  = 2    // NFTA_SET_DESC_CONCAT
	fieldLength = 1    // NFTA_SET_FIELD_LEN
	setExpr     = 17   // NFTA_SET_EXPR
	elemKeyEnd  = 10   // NFTA_SET_ELEM_KEY_END
	catchAll    = 2    // NFT_SET_ELEM_CATCHALL
)

// Data types of nft, see include/datatype.h of its source. A concatenation packs them into 6 bits each.
const (
	typeIPv4  = 7
	typeIPv6  = 8
	typeProto = 12
	typePort  = 13
	typeMark  = 19
	typeBits  = 6
)

// Values of the user data of sets (udata.h of libnftnl, datatype.h of nft).
const (
	udataKeyByteOrder  = 0
	udataDataByteOrder = 1
	byteOrderHost      = 1
	byteOrderBig       = 2
)

// SetFlags adds the flags that follow from key and data.
func SetFlags(key, data []Field, flags uint32) uint32 {
	if len(key) > 1 {
		flags |= flagConcat
	}
	if data != nil {
		flags |= unix.NFT_SET_MAP
	}
	return flags
}

// AddrLen is the length of an address of a family in bytes.
func AddrLen(family uint8) int {
	if family == unix.NFPROTO_IPV6 {
		return 16
	}
	return 4
}

// Len is the length of a field in a key, before padding to 4 bytes.
func (f Field) Len(addrLen int) int {
	switch f {
	case Addr:
		return addrLen
	case Proto:
		return 1
	case Port:
		return 2
	case Mark:
		return 4
	case Verdict:
		return 16 // sizeof(struct nft_verdict)
	default:
		return 0
	}
}

// Padded is the length of fields concatenated in registers of 4 bytes.
func Padded(fields []Field, addrLen int) (n int) {
	for _, f := range fields {
		n += align4(f.Len(addrLen))
	}
	return n
}

// DataType is nft's number of the type of a key or of data.
func DataType(fields []Field, addrLen int) (t uint32) {
	for _, f := range fields {
		var ft uint32
		switch f {
		case Addr:
			ft = typeIPv4
			if addrLen == AddrLen(unix.NFPROTO_IPV6) {
				ft = typeIPv6
			}
		case Proto:
			ft = typeProto
		case Port:
			ft = typePort
		case Mark:
			ft = typeMark
		case Verdict:
			return unix.NFT_DATA_VERDICT
		}
		t = t<<typeBits | ft
	}
	return t
}

// NewSet creates a set.
func (b *Batch) NewSet(s *Set) {
	addrLen := AddrLen(b.Family)
	b.start(&setKind, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, "add", s.Name)
	b.Uint32(unix.NFTA_SET_FLAGS, s.Flags)
	b.Uint32(unix.NFTA_SET_KEY_TYPE, DataType(s.Key, addrLen))
	b.Uint32(unix.NFTA_SET_KEY_LEN, uint32(Padded(s.Key, addrLen)))
	if s.Data != nil {
		b.Uint32(unix.NFTA_SET_DATA_TYPE, DataType(s.Data, addrLen))
		b.Uint32(unix.NFTA_SET_DATA_LEN, uint32(Padded(s.Data, addrLen)))
	}
	b.Uint32(unix.NFTA_SET_ID, s.ID)
	if s.Timeout != 0 {
		b.Uint64(unix.NFTA_SET_TIMEOUT, uint64(s.Timeout.Milliseconds()))
	}
	if s.Size != 0 || len(s.Key) > 1 {
		b.Nest(unix.NFTA_SET_DESC, func() { b.setDescription(s) })
	}
	if s.Counter {
		b.Nest(setExpr, func() { b.Text(unix.NFTA_EXPR_NAME, "counter") })
	}
	b.Attr(unix.NFTA_SET_USERDATA, setUserdata(s))
	b.End()
}

func (b *Batch) setDescription(s *Set) {
	if s.Size != 0 {
		b.Uint32(unix.NFTA_SET_DESC_SIZE, s.Size)
	}
	if len(s.Key) < 2 {
		return
	}
	b.Nest(descConcat, func() {
		for _, f := range s.Key {
			b.Nest(unix.NFTA_LIST_ELEM, func() { b.Uint32(fieldLength, uint32(f.Len(AddrLen(b.Family)))) })
		}
	})
}

// setUserdata is the byte order of keys and data. Without it nft prints ranges and marks wrongly.
func setUserdata(s *Set) []byte {
	u := Userdata(udataKeyByteOrder, byteOrder(s.Key))
	if len(s.Data) > 0 && s.Data[0] != Verdict {
		u = append(u, Userdata(udataDataByteOrder, byteOrder(s.Data))...)
	}
	return u
}

func byteOrder(fields []Field) []byte {
	order := uint32(byteOrderBig)
	if fields[0] == Mark {
		order = byteOrderHost
	}
	return binary.NativeEndian.AppendUint32(nil, order)
}

// GetSet asks for a set.
func (b *Batch) GetSet(name string) { b.message(&setKind, unix.NFT_MSG_GETSET, 0, "read", name) }

// DeleteSet deletes a set.
func (b *Batch) DeleteSet(name string) { b.message(&setKind, unix.NFT_MSG_DELSET, 0, "delete", name) }

// ElementOp is what is done to elements.
type ElementOp struct {
	msg, flags uint16
	name       string
}

// AddElements adds elements to a set.
func AddElements() ElementOp {
	return ElementOp{unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, "add"}
}

// DeleteElements deletes elements of a set.
func DeleteElements() ElementOp { return ElementOp{unix.NFT_MSG_DELSETELEM, 0, "delete"} }

// GetElements reads elements of a set. The kernel answers in their order, until the first that does not exist.
func GetElements() ElementOp { return ElementOp{unix.NFT_MSG_GETSETELEM, 0, "read"} }

// maxMessageLen leaves room below the 16 bits of an attribute's length.
const maxMessageLen = 60 << 10

// Elements writes encoded elements, all of one size, in as many messages as they need.
func (b *Batch) Elements(op ElementOp, set string, encoded []byte, size int) {
	for len(encoded) > 0 {
		n := min(len(encoded), maxMessageLen/size*size)
		b.ElementList(op, set, func() { b.Buf = append(b.Buf, encoded[:n]...) })
		encoded = encoded[n:]
	}
}

// ElementList writes one message with the elements that write writes.
func (b *Batch) ElementList(op ElementOp, set string, write func()) {
	b.start(&elementKind, op.msg, op.flags, op.name, set)
	b.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, write)
	b.End()
}

// CatchAll adds, deletes or reads the catch-all element of a set.
func (b *Batch) CatchAll(op ElementOp, set string) {
	b.ElementList(op, set, func() {
		b.Nest(unix.NFTA_LIST_ELEM, func() { b.Uint32(unix.NFTA_SET_ELEM_FLAGS, catchAll) })
	})
	b.Last().Object = "catch-all element of set " + set
}

// VerdictElement adds an element that leads to a chain: code is NFT_GOTO or NFT_JUMP.
func (b *Batch) VerdictElement(set string, key []byte, code int32, chain string) {
	b.ElementList(AddElements(), set, func() {
		b.Nest(unix.NFTA_LIST_ELEM, func() {
			b.Nest(unix.NFTA_SET_ELEM_KEY, func() { b.Attr(unix.NFTA_DATA_VALUE, key) })
			b.Nest(unix.NFTA_SET_ELEM_DATA, func() {
				b.Nest(unix.NFTA_DATA_VERDICT, func() {
					b.Uint32(unix.NFTA_VERDICT_CODE, uint32(code))
					b.Text(unix.NFTA_VERDICT_CHAIN, chain)
				})
			})
		})
	})
	b.Last().Object = "element of map " + set + " for chain " + chain
}

// Flush empties a set.
func (b *Batch) Flush(set string) {
	b.message(&elementKind, unix.NFT_MSG_DELSETELEM, 0, "delete all", set)
}

// ListElements asks for all elements of a set.
func (b *Batch) ListElements(set string) {
	b.message(&elementKind, unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP, "list", set)
}

// AppendElement appends one element of a set: its key, the end of its range if it has one, and its data
// if the set is a map.
func AppendElement(b, key, keyEnd, data []byte) []byte { return appendElement(b, key, keyEnd, data, 0) }

// AppendIntervalEdge appends the first address of an interval, or the first one after it.
func AppendIntervalEdge(b []byte, a netip.Addr, end bool) []byte {
	var flags uint32
	if end {
		flags = unix.NFT_SET_ELEM_INTERVAL_END
	}
	return appendElement(b, a.AsSlice(), nil, nil, flags)
}

func appendElement(b, key, keyEnd, data []byte, flags uint32) []byte {
	start := len(b)
	b = appendAttrHeader(b, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, 0)
	b = appendNestedValue(b, unix.NFTA_SET_ELEM_KEY, key)
	if keyEnd != nil {
		b = appendNestedValue(b, elemKeyEnd, keyEnd)
	}
	if data != nil {
		b = appendNestedValue(b, unix.NFTA_SET_ELEM_DATA, data)
	}
	if flags != 0 {
		b = binary.BigEndian.AppendUint32(appendAttrHeader(b, unix.NFTA_SET_ELEM_FLAGS, 4), flags)
	}
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

func appendNestedValue(b []byte, typ uint16, value []byte) []byte {
	b = appendAttrHeader(b, typ|unix.NLA_F_NESTED, 4+align4(len(value)))
	return AppendAttr(b, unix.NFTA_DATA_VALUE, value)
}

// Element is an element of a set in the kernel.
type Element struct {
	Key, KeyEnd, Data []byte
	Verdict           []byte // attributes of NFTA_DATA_VERDICT
	End               bool   // the exclusive end of an interval, not an element
	Packets           uint64 // that its counter has counted
}

// ElementsOf yields the elements in the attributes of a message.
func ElementsOf(attrs []byte) iter.Seq[Element] {
	return func(yield func(Element) bool) {
		for _, item := range netlinkx.Attributes(netlinkx.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			if e := ParseElement(item); e.Key != nil && !yield(e) {
				return
			}
		}
	}
}

// ParseElement parses one element; its key is nil if it has none.
func ParseElement(b []byte) (e Element) {
	for typ, value := range netlinkx.Attributes(b) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = netlinkx.Find(value, unix.NFTA_DATA_VALUE)
		case elemKeyEnd:
			e.KeyEnd = netlinkx.Find(value, unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_DATA:
			e.Data = netlinkx.Find(value, unix.NFTA_DATA_VALUE)
			e.Verdict = netlinkx.Find(value, unix.NFTA_DATA_VERDICT)
		case unix.NFTA_SET_ELEM_EXPR:
			e.Packets = netlinkx.Uint64(netlinkx.Find(value, unix.NFTA_EXPR_DATA, unix.NFTA_COUNTER_PACKETS))
		case unix.NFTA_SET_ELEM_FLAGS:
			e.End = netlinkx.Uint32(value)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		}
	}
	return e
}

// Strings returns the key, with its end, and the data, in one piece of memory.
func (e *Element) Strings() (key, data string) {
	var buf [128]byte
	keys := append(append(buf[:0], e.Key...), e.KeyEnd...)
	all := string(append(keys, e.Data...))
	return all[:len(keys)], all[len(keys):]
}

// Chain is where the verdict of an element leads to, "" if it has none. It jumps or goes there.
func (e *Element) Chain() (chain string, jumps bool) {
	if e.Verdict == nil {
		return "", false
	}
	code := int32(netlinkx.Uint32(netlinkx.Find(e.Verdict, unix.NFTA_VERDICT_CODE)))
	return netlinkx.String(netlinkx.Find(e.Verdict, unix.NFTA_VERDICT_CHAIN)), code == unix.NFT_JUMP
}
