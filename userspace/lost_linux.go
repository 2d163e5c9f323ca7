package userspace

import (
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
)

// isLost reports whether a socket that is open here does not serve its address any more: root can close
// sockets of others, such as with ss -K (SOCK_DESTROY).
func isLost(conn syscall.RawConn, protocol desired.Protocol, at netip.AddrPort) (lost bool) {
	err := conn.Control(func(fd uintptr) {
		if protocol == desired.TCP {
			accepts, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
			lost = err != nil || accepts == 0
			return
		}
		name, err := unix.Getsockname(int(fd)) // it has no port any more
		lost = err != nil || portOf(name) != at.Port()
	})
	return lost || err != nil
}

func portOf(name unix.Sockaddr) uint16 {
	switch name := name.(type) {
	case *unix.SockaddrInet4:
		return uint16(name.Port)
	case *unix.SockaddrInet6:
		return uint16(name.Port)
	default:
		return 0
	}
}
