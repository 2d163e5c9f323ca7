package conntrack

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Flags of the TCP header (RFC 9293, section 3.1).
const (
	flagSYN = 0x02
	flagRST = 0x04
	flagACK = 0x10
)

const (
	tcpHeaderLen = 20
	hopLimit     = 64
)

// segment returns an IP packet with a TCP header without options and data.
func segment(from, to netip.AddrPort, flags byte) []byte {
	tcp := make([]byte, tcpHeaderLen)
	binary.BigEndian.PutUint16(tcp, from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	tcp[12], tcp[13] = tcpHeaderLen/4<<4, flags
	addrs := append(from.Addr().AsSlice(), to.Addr().AsSlice()...)
	pseudo := append(append([]byte(nil), addrs...), 0, 0, 0, tcpHeaderLen, 0, 0, 0, unix.IPPROTO_TCP)
	binary.BigEndian.PutUint16(tcp[16:], checksum(append(pseudo, tcp...)))
	if from.Addr().Is4() {
		// The kernel fills in the checksum and the identification.
		header := []byte{0x45, 0, 0, 20 + tcpHeaderLen, 0, 0, 0, 0, hopLimit, unix.IPPROTO_TCP, 0, 0}
		return append(append(header, addrs...), tcp...)
	}
	header := []byte{0x60, 0, 0, 0, 0, tcpHeaderLen, unix.IPPROTO_TCP, hopLimit}
	return append(append(header, addrs...), tcp...)
}

// checksum is that of RFC 1071, of an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
