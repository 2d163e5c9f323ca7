package nftext

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Verdict names a verdict of linux/netfilter.h or linux/netfilter/nf_tables.h.
func Verdict(code uint32, chain string) string {
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
		return "drop"
	case stolen:
		return "stolen"
	case queue:
		return "queue"
	default:
		return "accept"
	}
}

// ConnectionState names the bits of a state of connection tracking (linux/netfilter/nf_conntrack_common.h).
func ConnectionState(bits uint32) string {
	return states.text(nil, binary.NativeEndian.AppendUint32(nil, bits))
}

// Family names a family of linux/netfilter.h.
func Family(family byte) string {
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

// Header has the offsets of the addresses in the header of an IP packet, and their length.
type Header struct{ Source, Destination, Size uint32 }

// HeaderOf returns the Header of packets whose addresses have so many bits.
func HeaderOf(bits int) Header {
	const (
		sourceV4, destinationV4 = 12, 16 // of struct iphdr
		sourceV6, destinationV6 = 8, 24  // of struct ipv6hdr
	)
	if bits == netip.IPv4Unspecified().BitLen() {
		return Header{sourceV4, destinationV4, destinationV4 - sourceV4}
	}
	return Header{sourceV6, destinationV6, destinationV6 - sourceV6}
}
