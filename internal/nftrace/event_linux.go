package nftrace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nftext"
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
	nfgenLen        = 4 // sizeof(struct nfgenmsg)
)

var errOtherMessage = errors.New("not an event of a trace")

// parse decodes an event.
func parse(m netlinkx.Message) (e event, err error) {
	if m.Type != msgTrace || len(m.Body) < nfgenLen {
		return e, errOtherMessage
	}
	family, attrs := m.Netfilter()
	e.Family = nftext.Family(family)
	ad, err := netlink.NewAttributeDecoder(attrs)
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
			decodeVerdict(&e.MatchedRule, ad)
		}
	}
	if destination.IsValid() {
		e.source, e.destination = netip.AddrPortFrom(source, ports[0]), netip.AddrPortFrom(destination, ports[1])
	}
	return e, ad.Err()
}

// decodeVerdict takes over an attribute of an event, if it is about the verdict.
func decodeVerdict(s *MatchedRule, ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case traceType:
		s.Policy = ad.Uint32() == typePolicy
	case tracePolicy:
		s.Verdict = nftext.Verdict(ad.Uint32(), "")
	case traceResult:
		s.Verdict = nftext.VerdictOf(ad.Bytes())
	}
}

func familyNumber(name string) byte {
	for _, family := range []byte{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6, unix.NFPROTO_NETDEV, unix.NFPROTO_BRIDGE} {
		if nftext.Family(family) == name {
			return family
		}
	}
	return unix.NFPROTO_UNSPEC
}

// addresses reads those of the header of an IP packet; they are invalid if it is none.
func addresses(b []byte) (source, destination netip.Addr) {
	const version4, version6, shift = 4, 6, 4
	if len(b) == 0 || b[0]>>shift != version4 && b[0]>>shift != version6 {
		return source, destination
	}
	at := nftext.HeaderOf(netip.IPv6Unspecified().BitLen())
	if b[0]>>shift == version4 {
		at = nftext.HeaderOf(netip.IPv4Unspecified().BitLen())
	}
	if len(b) < int(at.Destination+at.Size) {
		return source, destination
	}
	source, _ = netip.AddrFromSlice(b[at.Source : at.Source+at.Size])
	destination, _ = netip.AddrFromSlice(b[at.Destination : at.Destination+at.Size])
	return source, destination
}

// portsOf reads the ports of the source and the destination of a TCP, UDP or SCTP packet.
func portsOf(b []byte) (ports [2]uint16) {
	if _, err := binary.Decode(b, binary.BigEndian, &ports); err != nil {
		return [2]uint16{}
	}
	return ports
}
