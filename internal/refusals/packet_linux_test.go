package refusals

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
)

// The payload of each packet is the mark and its number.
const payloadMark = "serviceplane refusals"

// hops lets a packet reach a pod behind the router, and no packet circle.
const hops = 4

// experimental is a protocol without ports (RFC 3692).
const experimental desired.Protocol = 253

// flags of TCP.
const (
	fin, syn, rst, ack = 1, 2, 4, 16
)

// packet is what is sent. Other protocols than TCP, UDP and SCTP have the payload only.
type packet struct {
	protocol    desired.Protocol
	source      netip.AddrPort
	destination netip.AddrPort
	number      uint64
	flags       byte // of TCP
	badChecksum bool
}

// bytes returns the packet from its IP header on.
func (p packet) bytes() []byte {
	payload := binary.BigEndian.AppendUint64([]byte(payloadMark), p.number)
	body := p.body(payload)
	src, dst := p.source.Addr().AsSlice(), p.destination.Addr().AsSlice()
	if p.destination.Addr().Is6() {
		header := []byte{0x60, 0, 0, 0, 0, 0, byte(p.protocol), hops}
		binary.BigEndian.PutUint16(header[4:], uint16(len(body)))
		return bytes.Join([][]byte{header, src, dst, body}, nil)
	}
	header := []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, hops, byte(p.protocol), 0, 0}
	binary.BigEndian.PutUint16(header[2:], uint16(20+len(body)))
	header = bytes.Join([][]byte{header, src, dst}, nil)
	binary.BigEndian.PutUint16(header[10:], checksum(header))
	return append(header, body...)
}

func (p packet) body(payload []byte) (body []byte) {
	ports := binary.BigEndian.AppendUint16(nil, p.source.Port())
	ports = binary.BigEndian.AppendUint16(ports, p.destination.Port())
	var at int // of the checksum
	switch p.protocol {
	case desired.TCP:
		at = 16
		body = append(ports, 0, 0, 0, 1, 0, 0, 0, 1, 5<<4, p.flags, 0xff, 0xff, 0, 0, 0, 0)
	case desired.UDP:
		at = 6
		body = binary.BigEndian.AppendUint16(ports, uint16(8+len(payload)))
		body = append(body, 0, 0)
	case desired.SCTP:
		return sctpInit(ports, payload)
	case unix.IPPROTO_ICMP:
		at = 2
		body = append([]byte{8, 0, 0, 0}, ports...)
	case unix.IPPROTO_ICMPV6:
		at = 2
		body = append([]byte{128, 0, 0, 0}, ports...)
	default:
		return payload
	}
	body = append(body, payload...)
	pseudo := binary.BigEndian.AppendUint32(bytes.Join([][]byte{p.source.Addr().AsSlice(), p.destination.Addr().AsSlice()}, nil), uint32(len(body)))
	pseudo = append(pseudo, 0, 0, 0, byte(p.protocol))
	if p.protocol == unix.IPPROTO_ICMP {
		pseudo = nil
	}
	sum := checksum(append(pseudo, body...))
	if p.badChecksum {
		sum++
	}
	binary.BigEndian.PutUint16(body[at:], sum)
	return body
}

// sctpInit is an INIT chunk with the payload in a parameter that receivers skip (RFC 9260,
// sections 3.2.1 and 3.3.2).
func sctpInit(ports, payload []byte) []byte {
	for len(payload)%4 != 0 {
		payload = append(payload, 0)
	}
	parameter := binary.BigEndian.AppendUint16([]byte{0x80, 1}, uint16(4+len(payload)))
	chunk := append([]byte{0, 0, 0, 0, 0, 1, 0, 0, 0x10, 0, 0, 1, 0, 1, 0, 0, 0, 1}, parameter...)
	chunk = append(append([]byte{1, 0}, binary.BigEndian.AppendUint16(nil, uint16(2+2+16+4+len(payload)))...), chunk[2:]...)
	body := append(append(ports, 0, 0, 0, 0, 0, 0, 0, 0), append(chunk, payload...)...)
	binary.LittleEndian.PutUint32(body[8:], crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)))
	return body
}

// checksum is that of RFC 1071.
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// receipt is a packet that a host got.
type receipt struct {
	host string
	to   netip.AddrPort
	from netip.AddrPort
	// number is that of the payload. If accepted, it is an answer instead: a SYN ACK.
	number   uint64
	accepted bool
}

// parse returns false for packets that are not of this test, and for errors of ICMP, which hold
// packets that were refused.
func parse(b []byte) (r receipt, ok bool) {
	var protocol desired.Protocol
	var transport []byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		protocol, transport = desired.Protocol(b[9]), b[int(b[0]&15)*4:]
		r.from, r.to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[12:])), 0), netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[16:])), 0)
	case len(b) >= 40 && b[0]>>4 == 6:
		protocol, transport = desired.Protocol(b[6]), b[40:]
		r.from, r.to = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:])), 0), netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[24:])), 0)
	default:
		return r, false
	}
	if len(transport) < 8 {
		return r, false
	}
	switch protocol {
	case desired.TCP, desired.UDP, desired.SCTP:
		r.from = netip.AddrPortFrom(r.from.Addr(), binary.BigEndian.Uint16(transport))
		r.to = netip.AddrPortFrom(r.to.Addr(), binary.BigEndian.Uint16(transport[2:]))
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		if transport[0] != 8 && transport[0] != 128 {
			return r, false
		}
	}
	if protocol == desired.TCP && len(transport) >= 20 && transport[13]&(syn|ack) == syn|ack {
		r.accepted = true
		return r, true
	}
	r.number, ok = number(b)
	return r, ok
}

// number finds the payload of a packet.
func number(b []byte) (n uint64, ok bool) {
	_, after, found := bytes.Cut(b, []byte(payloadMark))
	if !found || len(after) < 8 {
		return 0, false
	}
	return binary.BigEndian.Uint64(after), true
}
