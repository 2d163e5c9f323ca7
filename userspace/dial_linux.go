package userspace

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// keepAlive is how long a connection is idle before the kernel asks whether the other end
// is there, and the time between two such questions. The ninth without an answer ends the
// connection. A net.Dialer has the same times.
const keepAlive = 15 * time.Second

// endpointConn is a TCP connection to an endpoint. A net.Dialer would take twice as much CPU
// time for it: deadlines and goroutines for handshakes that are over at once, both
// addresses, and timers that each socket option of a connected socket sets again.
type endpointConn struct {
	*os.File

	to netip.AddrPort
}

// dialTCP connects to an endpoint.
func dialTCP(ctx context.Context, _ string, to netip.AddrPort, timeout time.Duration) (net.Conn, error) {
	family, address := sockaddr(to)
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	for _, option := range [...]struct{ level, name, value int }{
		{unix.SOL_TCP, unix.TCP_NODELAY, 1},
		{unix.SOL_TCP, unix.TCP_KEEPIDLE, int(keepAlive / time.Second)},
		{unix.SOL_TCP, unix.TCP_KEEPINTVL, int(keepAlive / time.Second)},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
	} {
		_ = unix.SetsockoptInt(fd, option.level, option.name, option.value) // the connection works without
	}
	// Called again, connect(2) returns how the handshake went. With an endpoint on this
	// machine, it is over when the first call returns.
	if err = unix.Connect(fd, address); pending(err) {
		err = unix.Connect(fd, address)
	}
	conn := endpointConn{os.NewFile(uintptr(fd), "endpoint"), to}
	if pending(err) {
		err = conn.await(ctx, address, timeout)
	}
	if err == nil && boundTo(fd) == to {
		// The socket is connected with itself: where nobody listens at an address of this
		// machine, the system may choose that very port for the client.
		err = unix.ECONNREFUSED
	}
	if err != nil {
		_ = conn.Close()
		return nil, os.NewSyscallError("connect", err)
	}
	return conn, nil
}

// pending reports whether a handshake continues.
func pending(err error) bool {
	return errors.Is(err, unix.EINPROGRESS) || errors.Is(err, unix.EALREADY) || errors.Is(err, unix.EINTR)
}

// await waits for the end of the handshake.
func (c endpointConn) await(ctx context.Context, address unix.Sockaddr, timeout time.Duration) error {
	if err := c.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetWriteDeadline(time.Unix(1, 0)) })
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	err = raw.Write(func(fd uintptr) (done bool) {
		result = unix.Connect(int(fd), address)
		return !pending(result)
	})
	if !stop() {
		return context.Cause(ctx)
	}
	return errors.Join(err, result, c.SetWriteDeadline(time.Time{}))
}

// LocalAddr implements net.Conn; nobody asks for it.
func (c endpointConn) LocalAddr() net.Addr { return &net.TCPAddr{} }

// RemoteAddr returns the endpoint.
func (c endpointConn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.to) }

// CloseWrite ends the direction to the endpoint.
func (c endpointConn) CloseWrite() error {
	return c.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
}

// SetLinger is as that of a net.TCPConn.
func (c endpointConn) SetLinger(seconds int) error {
	return c.control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: int32(seconds)})
	})
}

func (c endpointConn) control(f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return errors.Join(raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

// tcp returns the connection with access to its socket, if it is TCP.
func tcp(conn net.Conn) (socket syscall.Conn, ok bool) {
	switch conn.(type) {
	case *net.TCPConn, endpointConn:
		socket, ok = conn.(syscall.Conn)
	}
	return socket, ok
}
