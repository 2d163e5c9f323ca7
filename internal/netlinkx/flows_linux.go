package netlinkx

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Flow is an entry of connection tracking.
type Flow struct {
	Protocol uint8
	// Source and Destination are those of the original direction, Server is the
	// source of the reply direction.
	Source, Destination, Server netip.AddrPort
	// Answered says that a packet of the reply direction has been seen.
	Answered bool
	// TCPState is TCP_CONNTRACK_* of linux/netfilter/nf_conntrack_tcp.h, 0 for
	// other protocols.
	TCPState uint8
}

// Attributes of an entry, CTA_* of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaStatus     = 3
	ctaProtoInfo  = 4
	ctaID         = 12
	ctaZone       = 18

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaIPv4Src    = 1
	ctaIPv4Dst    = 2
	ctaIPv6Src    = 3
	ctaIPv6Dst    = 4
	ctaProtoNum   = 1
	ctaSrcPort    = 2
	ctaDstPort    = 3
	ctaInfoTCP    = 1
	ctaTCPState   = 1

	seenReply = 1 << 1 // IPS_SEEN_REPLY of linux/netfilter/nf_conntrack_common.h

	nested       = 0x8000
	nfgenMessage = 4 // length of struct nfgenmsg
)

// DeleteFlows deletes the entries of one address family that stale chooses, and
// returns how many. It reads the table once, or again if it changed too much
// meanwhile. The netlink package could do it too, but takes twice the time to
// parse what nobody asks for.
func DeleteFlows(s *Socket, family uint8, stale func(*Flow) bool) (deleted int, err error) {
	err = retry(func() error {
		var chosen [][]byte
		dump := s.request(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, family)
		err := dump.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(message []byte) bool {
			attrs := message[min(nfgenMessage, len(message)):]
			if flow, ok := parseFlow(attrs); ok && stale(&flow) {
				chosen = append(chosen, identity(attrs))
			}
			return true
		})
		if err != nil && !interrupted(err) {
			return fmt.Errorf("list flows: %w", err)
		}
		for _, id := range chosen {
			remove := s.request(nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, family)
			remove.AddRawData(id)
			_, deleteErr := remove.Execute(unix.NETLINK_NETFILTER, 0)
			switch {
			case deleteErr == nil:
				deleted++
			case !errors.Is(deleteErr, unix.ENOENT): // it may have ended by itself
				return fmt.Errorf("delete flow: %w", deleteErr)
			}
		}
		return err
	})
	return deleted, err
}

func parseFlow(attrs []byte) (f Flow, ok bool) {
	orig, reply := Find(attrs, ctaTupleOrig), Find(attrs, ctaTupleReply)
	f.Source, f.Destination = parseTuple(orig)
	f.Server, _ = parseTuple(reply)
	if number := Find(orig, ctaTupleProto, ctaProtoNum); len(number) == 1 {
		f.Protocol = number[0]
	}
	if status := Find(attrs, ctaStatus); len(status) == 4 {
		f.Answered = binary.BigEndian.Uint32(status)&seenReply != 0
	}
	if state := Find(attrs, ctaProtoInfo, ctaInfoTCP, ctaTCPState); len(state) == 1 {
		f.TCPState = state[0]
	}
	return f, f.Source.IsValid() && f.Destination.IsValid() && f.Server.IsValid()
}

func parseTuple(tuple []byte) (source, destination netip.AddrPort) {
	var src, dst netip.Addr
	for typ, value := range Attributes(Find(tuple, ctaTupleIP)) {
		switch typ {
		case ctaIPv4Src, ctaIPv6Src:
			src, _ = netip.AddrFromSlice(value)
		case ctaIPv4Dst, ctaIPv6Dst:
			dst, _ = netip.AddrFromSlice(value)
		}
	}
	var from, to uint16
	for typ, value := range Attributes(Find(tuple, ctaTupleProto)) {
		switch {
		case len(value) != 2:
		case typ == ctaSrcPort:
			from = binary.BigEndian.Uint16(value)
		case typ == ctaDstPort:
			to = binary.BigEndian.Uint16(value)
		}
	}
	return netip.AddrPortFrom(src, from), netip.AddrPortFrom(dst, to)
}

// identity is what the kernel needs to find an entry again, and not another one
// that took its place.
func identity(attrs []byte) []byte {
	var id []byte
	for typ, value := range Attributes(attrs) {
		switch typ {
		case ctaTupleOrig:
			id = appendAttribute(id, typ|nested, value)
		case ctaID, ctaZone:
			id = appendAttribute(id, typ, value)
		}
	}
	return id
}

func appendAttribute(b []byte, typ uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attrHeaderLen+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, value...)
	return append(b, slices.Repeat([]byte{0}, -len(value)&3)...)
}
