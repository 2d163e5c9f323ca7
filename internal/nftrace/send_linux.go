package nftrace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
)

// payload is what a UDP packet of Options.Send has.
const payload = "serviceplane trace"

// sender is a socket that is bound and has not sent anything.
type sender struct {
	packet desired.Packet
	port   uint16 // of the source
	file   *os.File
}

// newSender binds a socket to the packet's source in a network namespace.
func newSender(netNS string, p desired.Packet) (s *sender, err error) {
	s = &sender{packet: p}
	if err := namespace.Visit(netNS, s.open); err != nil {
		return nil, fmt.Errorf("send a packet from %v: %w", p.Source, err)
	}
	return s, nil
}

func (s *sender) open() error {
	domain, typ := unix.AF_INET6, unix.SOCK_STREAM
	if s.packet.Source.Is4() {
		domain = unix.AF_INET
	}
	if s.packet.Protocol == desired.UDP {
		typ = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(domain, typ|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	s.file = os.NewFile(uintptr(fd), "trace")
	if err := unix.Bind(fd, address(netip.AddrPortFrom(s.packet.Source, 0))); err != nil {
		return errors.Join(fmt.Errorf("bind: %w: want an address of the network namespace that sends", err), s.file.Close())
	}
	switch bound, err := unix.Getsockname(fd); a := bound.(type) {
	case *unix.SockaddrInet4:
		s.port = uint16(a.Port)
	case *unix.SockaddrInet6:
		s.port = uint16(a.Port)
	default:
		return errors.Join(fmt.Errorf("read the port: %w", err), s.file.Close())
	}
	return nil
}

func address(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

// send connects, and sends if the protocol is UDP. It returns nil after an answer.
func (s *sender) send(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = s.file.SetDeadline(time.Unix(1, 0)) })()
	raw, err := s.file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Write(func(fd uintptr) bool { // called again, perhaps too soon, connect(2) says how the handshake went
		failed = unix.Connect(int(fd), address(s.packet.Destination))
		return !errors.Is(failed, unix.EINPROGRESS) && !errors.Is(failed, unix.EALREADY)
	})
	if err := errors.Join(failed, err); err != nil || s.packet.Protocol == desired.TCP {
		return err
	}
	if _, err := s.file.WriteString(payload); err != nil {
		return err
	}
	_, err = s.file.Read(make([]byte, 1))
	return err
}

// outcome is the text of an error of send.
func outcome(err error) string {
	switch {
	case err == nil:
		return sentAnswered
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.ETIMEDOUT):
		return sentUnanswered
	case errors.Is(err, unix.ECONNREFUSED):
		return sentRefused
	default:
		if errno, ok := errors.AsType[unix.Errno](err); ok {
			return errno.Error()
		}
		return err.Error()
	}
}

func (s *sender) close() { _ = s.file.Close() }
