package packettrace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Numbers of linux/netfilter/nf_tables.h that package unix does not have.
const (
	msgTrace        = unix.NFNL_SUBSYS_NFTABLES<<8 | 17 // NFT_MSG_TRACE
	traceTable      = 1
	traceChain      = 2
	traceHandle     = 3
	traceType       = 4
	traceResult     = 5 // NFTA_TRACE_VERDICT
	traceID         = 6
	traceHeader     = 8 // NFTA_TRACE_NETWORK_HEADER
	traceTransport  = 9 // NFTA_TRACE_TRANSPORT_HEADER
	traceOutputType = 13
	tracePolicy     = 16
	typePolicy      = 1 // NFT_TRACETYPE_POLICY
	verdictCode     = 1 // NFTA_VERDICT_CODE
	verdictChain    = 2 // NFTA_VERDICT_CHAIN
	nfgenLen        = 4 // sizeof(struct nfgenmsg)
)

var errOtherMessage = errors.New("not an event of a trace")

// parse decodes an event.
func parse(m netlink.Message) (e event, err error) {
	if m.Header.Type != msgTrace || len(m.Data) < nfgenLen {
		return e, errOtherMessage
	}
	e.Family = familyName(m.Data[0])
	ad, err := netlink.NewAttributeDecoder(m.Data[nfgenLen:])
	if err != nil {
		return e, fmt.Errorf("decode event of a trace: %w", err)
	}
	ad.ByteOrder = binary.BigEndian
	var source, destination netip.Addr
	var ports [2]uint16
	for ad.Next() {
		switch ad.Type() {
		case traceTable:
			e.Table = ad.String()
		case traceChain:
			e.Chain = ad.String()
		case traceHandle:
			e.Handle = ad.Uint64()
		case traceID:
			e.id = ad.Uint32()
		case traceHeader:
			source, destination = addresses(ad.Bytes())
		case traceTransport:
			ports = portsOf(ad.Bytes())
		case traceOutputType:
			e.loopback = ad.Uint16() == unix.ARPHRD_LOOPBACK
		default:
			decodeVerdict(&e.Step, ad)
		}
	}
	if destination.IsValid() {
		e.source, e.destination = netip.AddrPortFrom(source, ports[0]), netip.AddrPortFrom(destination, ports[1])
	}
	return e, ad.Err()
}

// decodeVerdict takes over an attribute of an event, if it is about the verdict.
func decodeVerdict(s *Step, ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case traceType:
		s.Policy = ad.Uint32() == typePolicy
	case tracePolicy:
		s.Verdict = verdictText(ad.Uint32(), "")
	case traceResult:
		var code uint32
		var chain string
		ad.Nested(func(nested *netlink.AttributeDecoder) error {
			nested.ByteOrder = binary.BigEndian
			for nested.Next() {
				switch nested.Type() {
				case verdictCode:
					code = nested.Uint32()
				case verdictChain:
					chain = nested.String()
				}
			}
			return nil
		})
		s.Verdict = verdictText(code, chain)
	}
}

// verdictText names a verdict of linux/netfilter.h or linux/netfilter/nf_tables.h.
func verdictText(code uint32, chain string) string {
	const (
		codeMask = 0xff // NF_VERDICT_MASK
		stolen   = 2    // NF_STOLEN
		queue    = 3    // NF_QUEUE
	)
	switch int32(code) {
	case unix.NFT_CONTINUE, unix.NFT_BREAK:
		return "continue"
	case unix.NFT_JUMP:
		return "jump " + chain
	case unix.NFT_GOTO:
		return "goto " + chain
	case unix.NFT_RETURN:
		return "return"
	}
	switch code & codeMask {
	case 0: // NF_DROP, with an error code in the upper half
		return verdictDrop
	case stolen:
		return verdictStolen
	case queue:
		return "queue"
	default:
		return "accept"
	}
}

func familyName(family byte) string {
	switch family {
	case unix.NFPROTO_INET:
		return "inet"
	case unix.NFPROTO_IPV4:
		return "ip"
	case unix.NFPROTO_IPV6:
		return "ip6"
	case unix.NFPROTO_NETDEV:
		return "netdev"
	case unix.NFPROTO_BRIDGE:
		return "bridge"
	default:
		return fmt.Sprintf("family%d", family)
	}
}

func familyNumber(name string) byte {
	for _, family := range []byte{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6, unix.NFPROTO_NETDEV, unix.NFPROTO_BRIDGE} {
		if familyName(family) == name {
			return family
		}
	}
	return unix.NFPROTO_UNSPEC
}

// header has the offsets of the addresses in the header of an IP packet, and their length.
type header struct{ source, destination, size uint32 }

func headerOf(bits int) header {
	const (
		sourceV4, destinationV4 = 12, 16 // of struct iphdr
		sourceV6, destinationV6 = 8, 24  // of struct ipv6hdr
	)
	if bits == netip.IPv4Unspecified().BitLen() {
		return header{sourceV4, destinationV4, destinationV4 - sourceV4}
	}
	return header{sourceV6, destinationV6, destinationV6 - sourceV6}
}

// addresses reads those of the header of an IP packet; they are invalid if it is none.
func addresses(b []byte) (source, destination netip.Addr) {
	const version4, version6, shift = 4, 6, 4
	if len(b) == 0 || b[0]>>shift != version4 && b[0]>>shift != version6 {
		return source, destination
	}
	at := headerOf(netip.IPv6Unspecified().BitLen())
	if b[0]>>shift == version4 {
		at = headerOf(netip.IPv4Unspecified().BitLen())
	}
	if len(b) < int(at.destination+at.size) {
		return source, destination
	}
	source, _ = netip.AddrFromSlice(b[at.source : at.source+at.size])
	destination, _ = netip.AddrFromSlice(b[at.destination : at.destination+at.size])
	return source, destination
}

// portsOf reads the ports of the source and the destination of a TCP, UDP or SCTP packet.
func portsOf(b []byte) (ports [2]uint16) {
	if _, err := binary.Decode(b, binary.BigEndian, &ports); err != nil {
		return [2]uint16{}
	}
	return ports
}
