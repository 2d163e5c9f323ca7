package nftrace

import (
	"encoding/binary"
	"net/netip"

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
	traceCtState    = 21 // NFTA_TRACE_CT_STATE, since Linux 6.16
	typePolicy      = 1  // NFT_TRACETYPE_POLICY
)

// parse decodes an event. ok is false for other messages.
func parse(m netlinkx.Message) (e event, ok bool) {
	if m.Type != msgTrace {
		return e, false
	}
	family, attrs := m.Netfilter()
	e.Family = nftext.Family(family)
	var source, destination netip.Addr
	var ports [2]uint16
	for typ, value := range netlinkx.Attributes(attrs) {
		switch typ {
		case traceHeader:
			source, destination = addresses(value)
		case traceTransport:
			ports = portsOf(value)
		default:
			e.read(typ, value)
		}
	}
	if destination.IsValid() {
		e.source, e.destination = netip.AddrPortFrom(source, ports[0]), netip.AddrPortFrom(destination, ports[1])
	}
	return e, true
}

// read takes over an attribute that stands for itself.
func (e *event) read(typ uint16, value []byte) {
	switch typ {
	case traceTable:
		e.Table = netlinkx.String(value)
	case traceChain:
		e.Chain = netlinkx.String(value)
	case traceHandle:
		e.Handle = netlinkx.Uint64(value)
	case traceID:
		e.id = netlinkx.Uint32(value)
	case traceOutputType:
		e.loopback = len(value) == 2 && binary.BigEndian.Uint16(value) == unix.ARPHRD_LOOPBACK
	case traceCtState:
		e.state = nftext.ConnectionState(netlinkx.Uint32(value))
	case traceType:
		e.Policy = netlinkx.Uint32(value) == typePolicy
	case tracePolicy:
		e.Verdict = nftext.Verdict(netlinkx.Uint32(value), "")
	case traceResult:
		e.Verdict = nftext.VerdictOf(value)
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
