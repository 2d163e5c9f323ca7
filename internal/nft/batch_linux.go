package nft

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Batch is one or more messages about one table: a transaction, or questions. Its methods write a message, unless they
// say otherwise.
type Batch struct {
	Family   uint8 // NFPROTO_IPV4 or NFPROTO_IPV6
	Table    string
	Buf      []byte
	Messages []Message
}

// Message is a message of a Batch, as errors describe it.
type Message struct {
	Op, Object string
	// Detail, if set, adds to the object.
	Detail func() string
	// Answers is how many objects a question asks for.
	Answers int
	Start   int // offset in the buffer
}

// Begin begins a transaction.
func (b *Batch) Begin() { b.mark(unix.NFNL_MSG_BATCH_BEGIN) }

// Finish ends a transaction.
func (b *Batch) Finish() { b.mark(unix.NFNL_MSG_BATCH_END) }

func (b *Batch) mark(typ uint16) {
	b.begin(typ, 0, "commit", "transaction")
	n := len(b.Buf)
	b.Buf[n-4] = unix.AF_UNSPEC
	binary.BigEndian.PutUint16(b.Buf[n-2:], unix.NFNL_SUBSYS_NFTABLES)
	b.End()
}

// Start writes the beginning of a message: msg is NFT_MSG_*, flags are NLM_F_*. Attributes follow, and then End.
func (b *Batch) Start(msg, flags uint16, op, object string) {
	b.begin(unix.NFNL_SUBSYS_NFTABLES<<8|msg, flags, op, object)
}

func (b *Batch) begin(typ, flags uint16, op, object string) {
	b.Messages = append(b.Messages, Message{Op: op, Object: object, Start: len(b.Buf), Answers: 1})
	buf := binary.NativeEndian.AppendUint32(b.Buf, 0) // length, set by End
	buf = binary.NativeEndian.AppendUint16(buf, typ)
	buf = binary.NativeEndian.AppendUint16(buf, unix.NLM_F_REQUEST|flags)
	buf = binary.NativeEndian.AppendUint32(buf, uint32(len(b.Messages)-1))
	buf = binary.NativeEndian.AppendUint32(buf, 0) // the kernel fills in the port id
	b.Buf = append(buf, b.Family, 0, 0, 0)         // struct nfgenmsg: family, version 0, resource 0
}

// End completes the current message.
func (b *Batch) End() {
	start := b.Last().Start
	binary.NativeEndian.PutUint32(b.Buf[start:], uint32(len(b.Buf)-start))
}

// Last is the current message, or the last one.
func (b *Batch) Last() *Message { return &b.Messages[len(b.Messages)-1] }

// number gives the messages successive sequence numbers.
func (b *Batch) number(first uint32) {
	const sequenceAt = 8 // in struct nlmsghdr
	for i := range b.Messages {
		binary.NativeEndian.PutUint32(b.Buf[b.Messages[i].Start+sequenceAt:], first+uint32(i))
	}
}

// Attr writes an attribute.
func (b *Batch) Attr(typ uint16, data []byte) { b.Buf = AppendAttr(b.Buf, typ, data) }

// Text writes an attribute that ends with NUL.
func (b *Batch) Text(typ uint16, s string) {
	b.Buf = appendAttrHeader(b.Buf, typ, len(s)+1)
	b.Buf = append(b.Buf, s...)
	b.Buf = append(b.Buf, zeros[:align4(len(s)+1)-len(s)]...)
}

// Uint32 writes a number in network byte order.
func (b *Batch) Uint32(typ uint16, v uint32) {
	b.Buf = binary.BigEndian.AppendUint32(appendAttrHeader(b.Buf, typ, 4), v)
}

// Uint64 writes a number in network byte order.
func (b *Batch) Uint64(typ uint16, v uint64) {
	b.Buf = binary.BigEndian.AppendUint64(appendAttrHeader(b.Buf, typ, 8), v)
}

// Nest writes an attribute with the attributes that write writes.
func (b *Batch) Nest(typ uint16, write func()) {
	start := len(b.Buf)
	b.Buf = appendAttrHeader(b.Buf, typ|unix.NLA_F_NESTED, 0)
	write()
	binary.NativeEndian.PutUint16(b.Buf[start:], uint16(len(b.Buf)-start))
}

const zeros = "\x00\x00\x00\x00"

func align4(n int) int { return (n + 3) &^ 3 }

func appendAttrHeader(b []byte, typ uint16, dataLen int) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+dataLen))
	return binary.NativeEndian.AppendUint16(b, typ)
}

// AppendAttr appends an attribute to b.
func AppendAttr(b []byte, typ uint16, data []byte) []byte {
	b = append(appendAttrHeader(b, typ, len(data)), data...)
	return append(b, zeros[:align4(len(data))-len(data)]...)
}
