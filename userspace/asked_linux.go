package userspace

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// translatedFrom is what a connection was sent to before it was led here, and
// whether it was, as connection tracking remembers: SO_ORIGINAL_DST of linux/netfilter_ipv4.h, and
// IP6T_SO_ORIGINAL_DST of netfilter_ipv6/ip6_tables.h, which is the same number.
func translatedFrom(conn net.Conn, here netip.AddrPort) (before netip.AddrPort, led bool) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return here, true
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return here, false
	}
	before = here
	_ = raw.Control(func(fd uintptr) {
		if here.Addr().Is4() {
			// The answer is a sockaddr_in: family, port and address in its first 8 bytes.
			if a, err := unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST); err == nil {
				b := a.Multiaddr
				before = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4]))
			}
			return
		}
		if a, err := unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, unix.SO_ORIGINAL_DST); err == nil {
			port := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, a.Addr.Port))
			before = netip.AddrPortFrom(netip.AddrFrom16(a.Addr.Addr), port)
		}
	})
	return before, before != here
}
