package userspace

import (
	"encoding/binary"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
)

// kernelState is what the kernel says of an open socket. It changes when root closes the socket, such as with
// ss -K (SOCK_DESTROY): a TCP socket accepts nobody then, a UDP socket loses its port or its device.
type kernelState struct {
	closed bool // by this process
	tcp    byte // see tcpState
	port   uint16
	device string
}

func stateOf(conn syscall.RawConn, protocol desired.Protocol) (s kernelState) {
	err := conn.Control(func(fd uintptr) {
		if protocol == desired.TCP {
			s.tcp = tcpState(int(fd))
			return
		}
		if name, err := unix.Getsockname(int(fd)); err == nil {
			s.port = portOf(name)
		}
		s.device, _ = unix.GetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE) // none without an error
	})
	s.closed = err != nil
	return s
}

// tcpState is whether a socket accepts connections. With Multipath TCP it is tcpi_state of linux/tcp.h, of the
// subflow that listens, which Linux before 5.16 does not tell.
func tcpState(fd int) byte {
	if protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err == nil && protocol == unix.IPPROTO_MPTCP {
		if info, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			return binary.NativeEndian.AppendUint32(nil, uint32(info))[0]
		}
	}
	accepts, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return byte(accepts)
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
