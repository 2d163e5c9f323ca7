package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Types of messages, and lengths of headers.
const (
	nlmsgHeaderLen = unix.NLMSG_HDRLEN
	nfgenHeaderLen = 4 // sizeof(struct nfgenmsg)

	msgNewTable   = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE
	msgGetTable   = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETTABLE
	msgDelTable   = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE
	msgNewChain   = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWCHAIN
	msgGetChain   = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETCHAIN
	msgDelChain   = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELCHAIN
	msgNewRule    = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE
	msgGetRule    = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE
	msgDelRule    = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELRULE
	msgNewSet     = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWSET
	msgGetSet     = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETSET
	msgDelSet     = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELSET
	msgNewElement = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWSETELEM
	msgGetElement = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETSETELEM
	msgDelElement = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELSETELEM
	msgNewFlows   = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWFLOWTABLE
	msgGetFlows   = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETFLOWTABLE
	msgDelFlows   = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELFLOWTABLE
	msgNewGen     = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
	msgGetGen     = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN
)

// Attributes of linux/netfilter/nf_tables.h that package unix does not have.
const (
	tableUserdata = 6  // NFTA_TABLE_USERDATA
	chainUserdata = 12 // NFTA_CHAIN_USERDATA
	descConcat    = 2  // NFTA_SET_DESC_CONCAT
	fieldLength   = 1  // NFTA_SET_FIELD_LEN
	setAttrCount  = 20 // NFTA_SET_COUNT
	elemKeyEnd    = 10 // NFTA_SET_ELEM_KEY_END
)

// maxMessageLen leaves room below the 16 bits of an attribute's length.
const maxMessageLen = 60 << 10

// Data types of nft, see include/datatype.h of its source. A concatenation packs them into
// 6 bits each.
const (
	typeIPv4  = 7
	typeIPv6  = 8
	typeProto = 12
	typePort  = 13
	typeMark  = 19
	typeBits  = 6
)

// sequenceAt is the offset of the sequence number in a message.
const sequenceAt = 8

// message is a message of a batch, with a description for errors.
type message struct {
	op, object string
	start      int      // offset in the buffer
	objects    int      // that a query asks for
	rule       [][]byte // its expressions, if it is one
}

// describe names the object; a rule has its text.
func (m *message) describe(family uint8) string {
	if m.rule == nil {
		return m.object
	}
	return fmt.Sprintf("%s: %q", m.object, ruleText(family, m.rule))
}

// wire writes netlink messages of one family's table into one buffer.
type wire struct {
	family   uint8
	table    string
	buf      []byte
	messages []message
}

func align4(n int) int { return (n + 3) &^ 3 }

// number gives the messages successive sequence numbers.
func (w *wire) number(first uint32) {
	for i := range w.messages {
		binary.NativeEndian.PutUint32(w.buf[w.messages[i].start+sequenceAt:], first+uint32(i))
	}
}

// begin starts a message; its sequence number is its position in messages until it is sent.
func (w *wire) begin(typ, flags uint16, op, object string) {
	w.messages = append(w.messages, message{op: op, object: object, start: len(w.buf), objects: 1})
	b := binary.NativeEndian.AppendUint32(w.buf, 0) // length, set by endMessage
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|flags)
	b = binary.NativeEndian.AppendUint32(b, uint32(len(w.messages)-1))
	b = binary.NativeEndian.AppendUint32(b, 0) // the kernel fills in the port id
	w.buf = append(b, w.family, 0, 0, 0)       // struct nfgenmsg: family, version 0, resource 0
}

// endMessage completes the current message.
func (w *wire) endMessage() {
	start := w.messages[len(w.messages)-1].start
	binary.NativeEndian.PutUint32(w.buf[start:], uint32(len(w.buf)-start))
}

// batchMarker writes the begin or the end of a transaction.
func (w *wire) batchMarker(typ uint16) {
	w.begin(typ, 0, "commit", "transaction")
	n := len(w.buf)
	w.buf[n-4] = 0 // AF_UNSPEC
	binary.BigEndian.PutUint16(w.buf[n-2:], unix.NFNL_SUBSYS_NFTABLES)
	w.endMessage()
}

func (w *wire) attr(typ uint16, data []byte) { w.buf = appendAttr(w.buf, typ, data) }

func (w *wire) attrString(typ uint16, s string) {
	w.buf = appendAttrHeader(w.buf, typ, len(s)+1)
	w.buf = append(w.buf, s...)
	w.buf = append(w.buf, zeros[:align4(len(s)+1)-len(s)]...)
}

func (w *wire) attrUint32(typ uint16, v uint32) {
	w.buf = binary.BigEndian.AppendUint32(appendAttrHeader(w.buf, typ, 4), v)
}

// nest writes an attribute whose content is what write writes.
func (w *wire) nest(typ uint16, write func()) {
	start := len(w.buf)
	w.buf = appendAttrHeader(w.buf, typ|unix.NLA_F_NESTED, 0)
	write()
	binary.NativeEndian.PutUint16(w.buf[start:], uint16(len(w.buf)-start))
}

const zeros = "\x00\x00\x00\x00"

func appendAttrHeader(b []byte, typ uint16, dataLen int) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+dataLen))
	return binary.NativeEndian.AppendUint16(b, typ)
}

func appendAttr(b []byte, typ uint16, data []byte) []byte {
	b = append(appendAttrHeader(b, typ, len(data)), data...)
	return append(b, zeros[:align4(len(data))-len(data)]...)
}

// appendElement writes one element of a set: its key, the end of its range if it
// has one, and its data if the set is a map.
func appendElement(b []byte, key, keyEnd, data []byte) []byte {
	start := len(b)
	b = appendAttrHeader(b, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, 0)
	b = appendNestedValue(b, unix.NFTA_SET_ELEM_KEY, key)
	if keyEnd != nil {
		b = appendNestedValue(b, elemKeyEnd, keyEnd)
	}
	if data != nil {
		b = appendNestedValue(b, unix.NFTA_SET_ELEM_DATA, data)
	}
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

func appendNestedValue(b []byte, typ uint16, value []byte) []byte {
	b = appendAttrHeader(b, typ|unix.NLA_F_NESTED, 4+align4(len(value)))
	return appendAttr(b, unix.NFTA_DATA_VALUE, value)
}

// appendIntervalEdge writes the first address of an interval, or the first one
// after it.
func appendIntervalEdge(b []byte, a netip.Addr, end bool) []byte {
	start := len(b)
	b = appendAttrHeader(b, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, 0)
	b = appendNestedValue(b, unix.NFTA_SET_ELEM_KEY, a.AsSlice())
	if end {
		b = binary.BigEndian.AppendUint32(appendAttrHeader(b, unix.NFTA_SET_ELEM_FLAGS, 4), unix.NFT_SET_ELEM_INTERVAL_END)
	}
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

// elementOp is an operation on elements.
type elementOp struct {
	typ, flags uint16
	name       string
}

func addElements() elementOp { return elementOp{msgNewElement, unix.NLM_F_CREATE, "add"} }

func deleteElements() elementOp { return elementOp{msgDelElement, 0, "delete"} }

// elements writes the elements in as many messages as they need. It splits no element.
func (w *wire) elements(op elementOp, spec *setSpec, elements encoded) {
	for rest := elements.buf; len(rest) > 0; {
		n := min(len(rest), maxMessageLen/elements.size*elements.size)
		w.elementMessage(op, spec, rest[:n])
		rest = rest[n:]
	}
}

func (w *wire) elementMessage(op elementOp, spec *setSpec, encoded []byte) {
	w.begin(op.typ, op.flags, op.name, "elements of set "+spec.name)
	w.attrString(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
	w.attrString(unix.NFTA_SET_ELEM_LIST_SET, spec.name)
	w.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() { w.buf = append(w.buf, encoded...) })
	w.endMessage()
}

// getElements asks for elements by key. The kernel answers in this order, until the first that
// does not exist.
func (w *wire) getElements(spec *setSpec, keys []elementBytes) {
	w.begin(msgGetElement, 0, "read", "elements of set "+spec.name)
	w.messages[len(w.messages)-1].objects = len(keys)
	w.attrString(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
	w.attrString(unix.NFTA_SET_ELEM_LIST_SET, spec.name)
	w.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
		for i := range keys {
			w.buf = appendElement(w.buf, keys[i].bytes(), nil, nil)
		}
	})
	w.endMessage()
}

// catchAll reads or deletes the catch-all element of a set.
func (w *wire) catchAll(typ, flags uint16, op string, spec *setSpec) {
	const catchAll = 2 // NFT_SET_ELEM_CATCHALL of linux/netfilter/nf_tables.h
	w.begin(typ, flags, op, "catch-all element of set "+spec.name)
	w.messages[len(w.messages)-1].objects = 1
	w.attrString(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
	w.attrString(unix.NFTA_SET_ELEM_LIST_SET, spec.name)
	w.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
		w.nest(unix.NFTA_LIST_ELEM, func() { w.attrUint32(unix.NFTA_SET_ELEM_FLAGS, catchAll) })
	})
	w.endMessage()
}

// verdictElement adds an element of a verdict map that leads to a chain.
func (w *wire) verdictElement(spec *setSpec, key uint32, chain string) {
	code := int32(unix.NFT_GOTO)
	if spec.jumps {
		code = unix.NFT_JUMP
	}
	w.begin(msgNewElement, unix.NLM_F_CREATE, "add", "element of map "+spec.name+" for chain "+chain)
	w.attrString(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
	w.attrString(unix.NFTA_SET_ELEM_LIST_SET, spec.name)
	w.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
		w.nest(unix.NFTA_LIST_ELEM, func() {
			w.nest(unix.NFTA_SET_ELEM_KEY, func() { w.attr(unix.NFTA_DATA_VALUE, nativeMark(key)) })
			w.nest(unix.NFTA_SET_ELEM_DATA, func() {
				w.nest(unix.NFTA_DATA_VERDICT, func() {
					w.attrUint32(unix.NFTA_VERDICT_CODE, uint32(code))
					w.attrString(unix.NFTA_VERDICT_CHAIN, chain)
				})
			})
		})
	})
	w.endMessage()
}

// deleteMark deletes the element of a mark.
func (w *wire) deleteMark(spec *setSpec, key uint32) {
	w.elementMessage(deleteElements(), spec, appendElement(nil, nativeMark(key), nil, nil))
}

func nativeMark(m uint32) []byte { return binary.NativeEndian.AppendUint32(nil, m) }

// flush empties a set.
func (w *wire) flush(spec *setSpec) {
	w.begin(msgDelElement, 0, "flush", "set "+spec.name)
	w.attrString(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
	w.attrString(unix.NFTA_SET_ELEM_LIST_SET, spec.name)
	w.endMessage()
}

func (w *wire) newTable() {
	w.begin(msgNewTable, unix.NLM_F_CREATE, "add", "table "+w.table)
	w.attrString(unix.NFTA_TABLE_NAME, w.table)
	w.attr(tableUserdata, userdataString(udataComment, tableComment))
	w.endMessage()
}

// wakeTable clears the flag dormant of a table.
func (w *wire) wakeTable() {
	w.begin(msgNewTable, 0, "wake", "table "+w.table)
	w.attrString(unix.NFTA_TABLE_NAME, w.table)
	w.attrUint32(unix.NFTA_TABLE_FLAGS, 0)
	w.endMessage()
}

func (w *wire) deleteTable() {
	w.begin(msgDelTable, 0, "delete", "table "+w.table)
	w.attrString(unix.NFTA_TABLE_NAME, w.table)
	w.endMessage()
}

// newSet creates a set. size limits the number of elements; 0 is for sets that packets do
// not write.
func (w *wire) newSet(spec *setSpec, addrLen int, size uint32) {
	w.begin(msgNewSet, unix.NLM_F_CREATE, "add", "set "+spec.name)
	w.attrString(unix.NFTA_SET_TABLE, w.table)
	w.attrString(unix.NFTA_SET_NAME, spec.name)
	w.attrUint32(unix.NFTA_SET_FLAGS, spec.flags())
	w.attrUint32(unix.NFTA_SET_KEY_TYPE, dataType(spec.key, addrLen))
	w.attrUint32(unix.NFTA_SET_KEY_LEN, uint32(padded(spec.key, addrLen)))
	if spec.data != nil {
		w.attrUint32(unix.NFTA_SET_DATA_TYPE, dataType(spec.data, addrLen))
		w.attrUint32(unix.NFTA_SET_DATA_LEN, uint32(padded(spec.data, addrLen)))
	}
	w.attrUint32(unix.NFTA_SET_ID, uint32(spec.id)+1)
	if size != 0 || len(spec.key) > 1 {
		w.nest(unix.NFTA_SET_DESC, func() { w.setDescription(spec, addrLen, size) })
	}
	w.attr(unix.NFTA_SET_USERDATA, setUserdata(spec))
	w.endMessage()
}

func (w *wire) setDescription(spec *setSpec, addrLen int, size uint32) {
	if size != 0 {
		w.attrUint32(unix.NFTA_SET_DESC_SIZE, size)
	}
	if len(spec.key) < 2 {
		return
	}
	w.nest(descConcat, func() {
		for _, f := range spec.key {
			w.nest(unix.NFTA_LIST_ELEM, func() { w.attrUint32(fieldLength, uint32(fieldLen(f, addrLen))) })
		}
	})
}

func (w *wire) deleteSet(name string) {
	w.begin(msgDelSet, 0, "delete", "set "+name)
	w.attrString(unix.NFTA_SET_TABLE, w.table)
	w.attrString(unix.NFTA_SET_NAME, name)
	w.endMessage()
}

// flushChain deletes the rules of a chain.
func (w *wire) flushChain(name string) {
	w.begin(msgDelRule, 0, "flush", "chain "+name)
	w.attrString(unix.NFTA_RULE_TABLE, w.table)
	w.attrString(unix.NFTA_RULE_CHAIN, name)
	w.endMessage()
}

func (w *wire) deleteChain(name string) {
	w.begin(msgDelChain, 0, "delete", "chain "+name)
	w.attrString(unix.NFTA_CHAIN_TABLE, w.table)
	w.attrString(unix.NFTA_CHAIN_NAME, name)
	w.endMessage()
}

// newRule appends a rule of encoded expressions, with their checksum in its user data.
func (w *wire) newRule(chain string, exprs [][]byte, sum []byte) {
	w.begin(msgNewRule, unix.NLM_F_CREATE|unix.NLM_F_APPEND, "add", "rule in chain "+chain)
	w.messages[len(w.messages)-1].rule = exprs
	w.attrString(unix.NFTA_RULE_TABLE, w.table)
	w.attrString(unix.NFTA_RULE_CHAIN, chain)
	w.nest(unix.NFTA_RULE_EXPRESSIONS, func() {
		for _, e := range exprs {
			w.attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, e)
		}
	})
	w.attr(unix.NFTA_RULE_USERDATA, userdata(udataChecksum, sum))
	w.endMessage()
}

// dataType is nft's number of the type of a key or of data.
func dataType(fields []field, addrLen int) uint32 {
	var t uint32
	for _, f := range fields {
		var ft uint32
		switch f {
		case fieldAddr:
			ft = typeIPv4
			if addrLen == 16 {
				ft = typeIPv6
			}
		case fieldProto:
			ft = typeProto
		case fieldPort:
			ft = typePort
		case fieldMark:
			ft = typeMark
		case fieldVerdict:
			return unix.NFT_DATA_VERDICT
		}
		t = t<<typeBits | ft
	}
	return t
}

const (
	// tableComment marks a table as ours. In all versions, its sets have the meaning that
	// setSpecs gives their names.
	tableComment = "programmed by serviceplane"
	// layoutVersion is the comment of the base chains. They are replaced in the same
	// transaction as all other rules.
	layoutVersion = "serviceplane layout 1"
	checksumLen   = 8
)

// User data is a list of type, length and value, with one byte each for type and length
// (udata.h of libnftnl). Our types are far from those of nft.
const (
	udataComment       = 0 // of tables and of chains
	udataKeyByteOrder  = 0
	udataDataByteOrder = 1
	udataChecksum      = 0x5e
	byteOrderHost      = 1
	byteOrderBig       = 2
)

func userdata(typ uint8, value []byte) []byte {
	return append([]byte{typ, uint8(len(value))}, value...)
}

func userdataString(typ uint8, s string) []byte { return userdata(typ, append([]byte(s), 0)) }

// setUserdata sets the byte order of keys and data. Without it nft prints ranges and marks
// wrongly.
func setUserdata(spec *setSpec) []byte {
	u := userdata(udataKeyByteOrder, byteOrder(spec.key))
	if len(spec.data) > 0 && spec.data[0] != fieldVerdict {
		u = append(u, userdata(udataDataByteOrder, byteOrder(spec.data))...)
	}
	return u
}

func byteOrder(fields []field) []byte {
	order := uint32(byteOrderBig)
	if fields[0] == fieldMark {
		order = byteOrderHost
	}
	return binary.NativeEndian.AppendUint32(nil, order)
}
