package netlinkx

import (
	"testing"

	"github.com/vishvananda/netlink/nl"
)

// tuple is one direction of an entry of the connection tracking table.
func tuple(typ, source, destination uint16, from, to []byte) []byte {
	return nest(typ,
		nest(nl.CTA_TUPLE_IP, appendAttribute(nil, source, from), appendAttribute(nil, destination, to)),
		nest(nl.CTA_TUPLE_PROTO, appendAttribute(nil, nl.CTA_PROTO_NUM, []byte{6}), appendAttribute(nil, nl.CTA_PROTO_SRC_PORT, []byte{1, 2}), appendAttribute(nil, nl.CTA_PROTO_DST_PORT, []byte{0, 80})))
}

// FuzzFlow: an entry has addresses of one IP family, and the attributes by which it is
// deleted describe the same entry.
func FuzzFlow(f *testing.F) {
	f.Add(append(tuple(nl.CTA_TUPLE_ORIG, nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST, []byte{10, 0, 0, 1}, []byte{10, 96, 0, 1}),
		tuple(nl.CTA_TUPLE_REPLY, nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST, []byte{10, 0, 0, 2}, []byte{10, 0, 0, 1})...))
	f.Add(tuple(nl.CTA_TUPLE_ORIG, nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST, make([]byte, 16), make([]byte, 16)))
	f.Add([]byte{5, 0, 1, 0, 0xff})
	f.Fuzz(func(t *testing.T, attrs []byte) {
		flow, ok := parseFlow(attrs)
		id := identity(attrs)
		if !ok {
			return
		}
		source, destination := parseTuple(Find(id, nl.CTA_TUPLE_ORIG))
		if source != flow.Source || destination != flow.Destination {
			t.Errorf("the entry of %v to %v is deleted as %v to %v", flow.Source, flow.Destination, source, destination)
		}
	})
}
