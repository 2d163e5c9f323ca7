package userspace

import (
	"encoding/binary"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// refuser tells clients of UDP that their endpoint has refused a datagram, as its ICMP message would: port
// unreachable (RFC 1122, 4.1.3.1; RFC 4443, 3.1). The message leaves the way of an answer, so rules that
// translate the client's packets translate it. It needs CAP_NET_RAW; without, clients learn nothing.
type refuser struct {
	inside func(f func() error) error // runs f in Config.NetNS

	mu     sync.Mutex // guards all below
	conn   *icmp.PacketConn
	closed bool // or there is no privilege
}

// refuse sends the message for a datagram that came from a client to an address of the proxy.
func (r *refuser) refuse(client, dialled netip.AddrPort) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	network, any, message := "ip6:ipv6-icmp", "::", icmp.Message{Type: ipv6.ICMPTypeDestinationUnreachable, Code: 4}
	datagram := datagram6
	if client.Addr().Is4() {
		network, any, message = "ip4:icmp", "0.0.0.0", icmp.Message{Type: ipv4.ICMPTypeDestinationUnreachable, Code: 3}
		datagram = datagram4
	}
	if r.conn == nil {
		if err := r.inside(func() (err error) { r.conn, err = icmp.ListenPacket(network, any); return err }); err != nil {
			r.closed = true
			return
		}
	}
	message.Body = &icmp.DstUnreach{Data: datagram(client, dialled)}
	if text, err := message.Marshal(nil); err == nil {
		_, _ = r.conn.WriteTo(text, &net.IPAddr{IP: client.Addr().AsSlice(), Zone: client.Addr().Zone()}) // one more that is lost
	}
}

func (r *refuser) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn != nil {
		_ = r.conn.Close()
	}
	r.conn, r.closed = nil, false
}

const udpNumber, udpHeader = 17, 8

// datagram4 is the header of an IPv4 packet, and that of the datagram in it, which is empty.
func datagram4(from, to netip.AddrPort) []byte {
	const length = 20
	b := make([]byte, length, length+udpHeader)
	b[0], b[8], b[9] = 0x45, 64, udpNumber // version and length, TTL, protocol
	binary.BigEndian.PutUint16(b[2:], length+udpHeader)
	copy(b[12:], from.Addr().AsSlice())
	copy(b[16:], to.Addr().AsSlice())
	sum := uint32(0)
	for i := 0; i < length; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum+sum>>16)) //nolint:gosec // the carry is small
	return appendUDP(b, from, to)
}

// datagram6 is datagram4 for IPv6.
func datagram6(from, to netip.AddrPort) []byte {
	const length = 40
	b := make([]byte, length, length+udpHeader)
	b[0], b[6], b[7] = 0x60, udpNumber, 64 // version, next header, hop limit
	binary.BigEndian.PutUint16(b[4:], udpHeader)
	copy(b[8:], from.Addr().AsSlice())
	copy(b[24:], to.Addr().AsSlice())
	return appendUDP(b, from, to)
}

func appendUDP(b []byte, from, to netip.AddrPort) []byte {
	b = binary.BigEndian.AppendUint16(b, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	return append(b, 0, udpHeader, 0, 0)
}
