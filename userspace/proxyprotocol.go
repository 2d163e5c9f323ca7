package userspace

import (
	"encoding/binary"
	"net/netip"
)

// proxyHeader returns the header of the PROXY protocol, version 2, for a TCP connection
// (https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt, section 2.2): the
// signature, version and command, family and protocol, the length of the rest, and
// both addresses and ports. If the families differ, both addresses are written as IPv6.
func proxyHeader(client, server netip.AddrPort) []byte {
	const (
		commandProxy = 0x21 // version 2, PROXY
		tcp4, tcp6   = 0x11, 0x21
	)
	header := append([]byte("\r\n\r\n\x00\r\nQUIT\n"), commandProxy, tcp4, 0, 0)
	begin := len(header)
	if client.Addr().Is4() && server.Addr().Is4() {
		header = append(header, client.Addr().AsSlice()...)
		header = append(header, server.Addr().AsSlice()...)
	} else {
		from, to := client.Addr().As16(), server.Addr().As16()
		header[begin-3] = tcp6
		header = append(append(header, from[:]...), to[:]...)
	}
	header = binary.BigEndian.AppendUint16(header, client.Port())
	header = binary.BigEndian.AppendUint16(header, server.Port())
	binary.BigEndian.PutUint16(header[begin-2:], uint16(len(header)-begin))
	return header
}
