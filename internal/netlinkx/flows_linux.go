package netlinkx

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Flow is a conntrack entry.
type Flow struct {
	Protocol uint8
	// Source and Destination are those of the original direction, Server is the
	// source of the reply direction.
	Source, Destination, Server netip.AddrPort
	// Answered means that a packet of the reply direction has been seen.
	Answered bool
	// Translated means that a rule has translated the destination, and not IPVS, which
	// does so by itself.
	Translated bool
	// TCPState is TCP_CONNTRACK_* of linux/netfilter/nf_conntrack_tcp.h, 0 for other protocols
	// and for a connection in a flowtable, which has been answered.
	TCPState uint8

	attrs []byte // of the message; valid while it is read
}

// Handle identifies an entry for as long as it exists.
type Handle struct {
	// ReplyTo is the destination of the reply direction.
	ReplyTo netip.AddrPort
	// Zone reports whether the entry has a zone, in both directions or in one.
	Zone bool

	original string // the attributes by which the kernel finds the entry
}

// Handle returns the handle of a flow that is being listed.
func (f *Flow) Handle() Handle {
	original, reply := Find(f.attrs, nl.CTA_TUPLE_ORIG), Find(f.attrs, nl.CTA_TUPLE_REPLY)
	h := Handle{original: string(identity(f.attrs))}
	h.Zone = Find(f.attrs, nl.CTA_ZONE) != nil || Find(original, ctaTupleZone) != nil || Find(reply, ctaTupleZone) != nil
	_, h.ReplyTo = parseTuple(reply)
	return h
}

// ctaTupleZone is CTA_TUPLE_ZONE of linux/netfilter/nfnetlink_conntrack.h, the zone of one direction.
const ctaTupleZone = 3

// find calls each for the entry with this identity, if the kernel still has it.
func (s *Socket) find(family uint8, id []byte, each func(*Flow)) error {
	err := s.ask(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_ACK, family, id, each)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("get flow: %w", err)
	}
	return nil
}

// Delete deletes the entry, if the kernel still has it.
func (s *Socket) Delete(family uint8, h *Handle) (deleted bool, err error) {
	return s.remove(family, []byte(h.original))
}

func (s *Socket) remove(family uint8, id []byte) (deleted bool, err error) {
	err = s.ask(nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, family, id, nil)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT): // it has expired
		return false, nil
	default:
		return false, fmt.Errorf("delete flow: %w", err)
	}
}

// IPS_SEEN_REPLY and IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h.
const (
	ipsSeenReply = 1 << 1
	ipsDNAT      = 1 << 5
)

// Which are the entries that a dump lists at least. The zero value are all entries. The kernel does not compare
// ports of SCTP. The dump does not ask for addresses of IPv6: Linux 6.18 lists all entries but those with the address.
type Which struct {
	// Unanswered are entries that were not translated and have no answer. Kernels before 5.15 list others too.
	Unanswered bool
	// Entries have this Protocol, and clients have sent To this address and this port; a zero value admits all. A port
	// needs a Protocol.
	Protocol uint8
	To       netip.AddrPort
}

// TCPSynSent is TCP_CONNTRACK_SYN_SENT of linux/netfilter/nf_conntrack_tcp.h.
const TCPSynSent = 1

// Of linux/netfilter/nfnetlink_conntrack.h, and the bits of the kernel's nf_internals.h.
const (
	ctaFilter, ctaFilterOrigFlags, ctaStatusMask = 25, 1, 26
	filterAddress, filterProtocol, filterToPort  = 1 << 1, 1 << 3, 1 << 5
)

// DeleteFlows deletes the entries of one address family for which stale returns true, and
// returns how many. If the dump is interrupted, it repeats it. The netlink package has such
// a function too, but it takes twice the time, because it parses all attributes.
//
// A connection of TCP without an answer may get one while the dump lasts. So stale is asked about
// its present entry again, right before it is deleted.
func DeleteFlows(s *Socket, family uint8, which Which, stale func(*Flow) bool) (deleted int, err error) {
	type chosen struct {
		id    []byte
		again bool
	}
	err = Retry(func() error {
		var all []chosen
		err := s.list(context.Background(), family, which, func(flow *Flow) { //nolint:forbidigo // a part of them is deleted otherwise
			if stale(flow) {
				all = append(all, chosen{identity(flow.attrs), flow.TCPState == TCPSynSent})
			}
		})
		if err != nil && !errors.Is(err, ErrInterrupted) {
			return err
		}
		for _, c := range all {
			done, err := s.removeIf(family, c.id, c.again, stale)
			if err != nil {
				return err
			}
			if done {
				deleted++
			}
		}
		return err
	})
	return deleted, err
}

func (s *Socket) removeIf(family uint8, id []byte, look bool, stale func(*Flow) bool) (deleted bool, err error) {
	if look {
		still := false
		if err := s.find(family, id, func(flow *Flow) { still = stale(flow) }); err != nil || !still {
			return false, err
		}
	}
	return s.remove(family, id)
}

// ListFlows calls each for the entries of one address family, more than once if the dump is
// interrupted.
func ListFlows(ctx context.Context, s *Socket, family uint8, each func(*Flow)) error {
	return Retry(func() error { return s.list(ctx, family, Which{}, each) })
}

func (s *Socket) list(ctx context.Context, family uint8, which Which, each func(*Flow)) error {
	request := Request(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, family, which.filter()...)
	if err := s.netfilter.Ask(ctx, request, entries(each)); err != nil {
		return fmt.Errorf("list flows: %w", err)
	}
	return nil
}

func (w Which) filter() (attrs []byte) {
	if w.Unanswered {
		attrs = appendAttribute(attrs, nl.CTA_STATUS, nl.BEUint32Attr(0))
		attrs = appendAttribute(attrs, ctaStatusMask, nl.BEUint32Attr(ipsSeenReply|ipsDNAT))
	}
	var flags uint32
	var tuple, to []byte
	if addr := w.To.Addr(); addr.Is4() {
		flags |= filterAddress
		tuple = nest(nl.CTA_TUPLE_IP, appendAttribute(nil, nl.CTA_IP_V4_DST, addr.AsSlice()))
	}
	if w.Protocol != 0 {
		flags |= filterProtocol
		to = appendAttribute(nil, nl.CTA_PROTO_NUM, []byte{w.Protocol})
		if w.To.Port() != 0 {
			flags |= filterToPort
			to = appendAttribute(to, nl.CTA_PROTO_DST_PORT, binary.BigEndian.AppendUint16(nil, w.To.Port()))
		}
		tuple = append(tuple, nest(nl.CTA_TUPLE_PROTO, to)...)
	}
	if flags == 0 {
		return attrs
	}
	attrs = append(attrs, nest(nl.CTA_TUPLE_ORIG, tuple)...)
	return append(attrs, nest(ctaFilter, appendAttribute(nil, ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, flags)))...)
}

// Hash identifies an entry that is being listed, or whose end is being told: two have the same
// Hash with a probability of about 2 to the power of -64.
func (f *Flow) Hash(seed maphash.Seed) uint64 {
	return maphash.Comparable(seed, struct {
		source, destination netip.AddrPort
		protocol            uint8
		id                  uint32
	}{f.Source, f.Destination, f.Protocol, Uint32(Find(f.attrs, nl.CTA_ID))})
}

// Volume is what passed in one direction of an entry.
type Volume struct{ Packets, Bytes uint64 }

// Volumes returns what an entry has carried, in a list or in a notification of its end; ok is false if
// the kernel did not count it.
func (f *Flow) Volumes() (original, reply Volume, ok bool) {
	to, from := Find(f.attrs, nl.CTA_COUNTERS_ORIG), Find(f.attrs, nl.CTA_COUNTERS_REPLY)
	return parseVolume(to), parseVolume(from), to != nil
}

func parseVolume(counters []byte) (v Volume) {
	for typ, value := range Attributes(counters) {
		switch {
		case len(value) != 8:
		case typ == nl.CTA_COUNTERS_PACKETS:
			v.Packets = binary.BigEndian.Uint64(value)
		case typ == nl.CTA_COUNTERS_BYTES:
			v.Bytes = binary.BigEndian.Uint64(value)
		}
	}
	return v
}

func parseFlow(attrs []byte) (f Flow, ok bool) {
	f.attrs = attrs
	orig, reply := Find(attrs, nl.CTA_TUPLE_ORIG), Find(attrs, nl.CTA_TUPLE_REPLY)
	f.Source, f.Destination = parseTuple(orig)
	f.Server, _ = parseTuple(reply)
	if number := Find(orig, nl.CTA_TUPLE_PROTO, nl.CTA_PROTO_NUM); len(number) == 1 {
		f.Protocol = number[0]
	}
	if status := Find(attrs, nl.CTA_STATUS); len(status) == 4 {
		bits := binary.BigEndian.Uint32(status)
		f.Answered, f.Translated = bits&ipsSeenReply != 0, bits&ipsDNAT != 0
	}
	if state := Find(attrs, nl.CTA_PROTOINFO, nl.CTA_PROTOINFO_TCP, nl.CTA_PROTOINFO_TCP_STATE); len(state) == 1 {
		f.TCPState = state[0]
	}
	return f, f.Source.IsValid() && f.Destination.IsValid() && f.Server.IsValid()
}

func parseTuple(tuple []byte) (source, destination netip.AddrPort) {
	var src, dst netip.Addr
	for typ, value := range Attributes(Find(tuple, nl.CTA_TUPLE_IP)) {
		switch typ {
		case nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC:
			src, _ = netip.AddrFromSlice(value)
		case nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST:
			dst, _ = netip.AddrFromSlice(value)
		}
	}
	var from, to uint16
	for typ, value := range Attributes(Find(tuple, nl.CTA_TUPLE_PROTO)) {
		switch {
		case len(value) != 2:
		case typ == nl.CTA_PROTO_SRC_PORT:
			from = binary.BigEndian.Uint16(value)
		case typ == nl.CTA_PROTO_DST_PORT:
			to = binary.BigEndian.Uint16(value)
		}
	}
	return netip.AddrPortFrom(src, from), netip.AddrPortFrom(dst, to)
}

// identity returns the attributes by which the kernel finds the same entry again, and not
// a new one with the same addresses.
func identity(attrs []byte) []byte {
	var id []byte
	for typ, value := range Attributes(attrs) {
		switch typ {
		case nl.CTA_TUPLE_ORIG:
			id = appendAttribute(id, typ|unix.NLA_F_NESTED, value)
		case nl.CTA_ID, nl.CTA_ZONE:
			id = appendAttribute(id, typ, value)
		}
	}
	return id
}

// nest puts attributes into one.
func nest(typ uint16, inner ...[]byte) []byte {
	return appendAttribute(nil, typ|unix.NLA_F_NESTED, slices.Concat(inner...))
}

func appendAttribute(b []byte, typ uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attrHeaderLen+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, value...)
	return append(b, slices.Repeat([]byte{0}, -len(value)&3)...)
}
