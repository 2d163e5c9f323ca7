package userspace

import (
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
)

// reservePort binds a port without serving there: no other program of this machine can
// bind it, and the kernel refuses clients that bypass the portals. A TCP socket does
// that by not listening, a UDP socket by being connected to itself.
func reservePort(netNS string, protocol desired.Protocol, at netip.AddrPort) (fd int, err error) {
	kind, family := unix.SOCK_STREAM, unix.AF_INET6
	if protocol == desired.UDP {
		kind = unix.SOCK_DGRAM
	}
	var addr unix.Sockaddr = &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	if at.Addr().Is4() {
		family, addr = unix.AF_INET, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
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
