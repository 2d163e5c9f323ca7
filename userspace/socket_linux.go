package userspace

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
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
		s.port = boundTo(int(fd)).Port()
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

// boundTo returns the address of a socket; zero if it has none.
func boundTo(fd int) netip.AddrPort {
	local, _ := syscall.Getsockname(fd) // that of package unix asks for more
	switch local := local.(type) {
	case *syscall.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(local.Addr), uint16(local.Port))
	case *syscall.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(local.Addr), uint16(local.Port))
	default:
		return netip.AddrPort{}
	}
}

// sockaddr returns an address for system calls, and its family.
func sockaddr(at netip.AddrPort) (family int, addr unix.Sockaddr) {
	if at.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
}

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

// reservePort binds a port without serving there: no other program of this machine can
// bind it, and the kernel refuses clients that bypass the portals. A TCP socket does
// that by not listening, a UDP socket by being connected to itself.
func reservePort(netNS string, protocol desired.Protocol, at netip.AddrPort) (fd int, err error) {
	kind := unix.SOCK_STREAM
	if protocol == desired.UDP {
		kind = unix.SOCK_DGRAM
	}
	family, addr := sockaddr(at)
	err = namespace.Visit(netNS, func() error {
		fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		return -1, err
	}
	if err = os.NewSyscallError("bind", unix.Bind(fd, addr)); err == nil && protocol == desired.UDP {
		err = os.NewSyscallError("connect", unix.Connect(fd, addr))
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func closeReservation(fd int) { _ = unix.Close(fd) }
