package userspace

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// originalDst returns the destination of a connection before destination NAT, and
// whether there was any. Conntrack stores it: SO_ORIGINAL_DST of linux/netfilter_ipv4.h
// and IP6T_SO_ORIGINAL_DST of netfilter_ipv6/ip6_tables.h, which is the same number.
func originalDst(conn net.Conn, local netip.AddrPort) (dst netip.AddrPort, translated bool) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return local, true
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return local, false
	}
	dst = local
	_ = raw.Control(func(fd uintptr) {
		if local.Addr().Is4() {
			// The result is a sockaddr_in: its first 8 bytes are family, port and address.
			if a, err := unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST); err == nil {
				b := a.Multiaddr
				dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4]))
			}
			return
		}
		if a, err := unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, unix.SO_ORIGINAL_DST); err == nil {
			port := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, a.Addr.Port))
			dst = netip.AddrPortFrom(netip.AddrFrom16(a.Addr.Addr), port)
		}
	})
	return dst, dst != local
}
