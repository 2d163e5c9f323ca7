package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// endpoint returns the address of a socket that nobody accepts from yet, with room for this
// many connections and one more.
func endpoint(t *testing.T, at netip.Addr, room int) (addr netip.AddrPort, fd int) {
	t.Helper()
	family, bind := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: at.As16()})
	if at.Is4() {
		family, bind = unix.AF_INET, &unix.SockaddrInet4{Addr: at.As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, bind), unix.Listen(fd, room)); err != nil {
		t.Fatal(err)
	}
	local, err := unix.Getsockname(fd)
	switch local := local.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(at, uint16(local.Port)), fd
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(at, uint16(local.Port)), fd
	default:
		t.Fatalf("address of a socket: %v, %v", local, err)
		return addr, fd
	}
}

// A connection to an endpoint has the options that a net.Dialer sets.
func TestEndpointsHaveTheOptionsOfADialer(t *testing.T) {
	for _, at := range []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()} {
		to, _ := endpoint(t, at, 16)
		ours, err := dialTCP(t.Context(), "", to, patience)
		if err != nil {
			t.Fatal(err)
		}
		defer ours.Close()
		dialers, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", to.String())
		if err != nil {
			t.Fatal(err)
		}
		defer dialers.Close()
		if got := ours.RemoteAddr().String(); got != to.String() {
			t.Errorf("remote address %s, want %v", got, to)
		}
		for name, option := range map[string]struct{ level, name int }{
			"TCP_NODELAY":   {unix.SOL_TCP, unix.TCP_NODELAY},
			"SO_KEEPALIVE":  {unix.SOL_SOCKET, unix.SO_KEEPALIVE},
			"TCP_KEEPIDLE":  {unix.SOL_TCP, unix.TCP_KEEPIDLE},
			"TCP_KEEPINTVL": {unix.SOL_TCP, unix.TCP_KEEPINTVL},
			"TCP_KEEPCNT":   {unix.SOL_TCP, unix.TCP_KEEPCNT},
		} {
			value := func(conn net.Conn) (value int) {
				raw, err := conn.(syscall.Conn).SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				var failure error
				err = raw.Control(func(fd uintptr) { value, failure = unix.GetsockoptInt(int(fd), option.level, option.name) })
				if err = errors.Join(err, failure); err != nil {
					t.Fatal(err)
				}
				return value
			}
			if got, want := value(ours), value(dialers); got != want {
				t.Errorf("%v: %s is %d, want %d", at, name, got, want)
			}
		}
	}
}

// A handshake takes as long as its timeout or context allows. Here the endpoint's queue is
// full, so that it answers when there is room again.
func TestSlowHandshakes(t *testing.T) {
	t.Parallel()
	to, fd := endpoint(t, netip.MustParseAddr("127.0.0.1"), 0)
	filled := 0
	fails := func(ctx context.Context, timeout time.Duration, want error) {
		t.Helper()
		poll.Until(t, fmt.Sprint("the queue is full, and the error is: ", want), func() bool {
			conn, err := dialTCP(ctx, "", to, timeout)
			if err == nil {
				filled++
				t.Cleanup(func() { _ = conn.Close() })
			}
			return errors.Is(err, want)
		})
	}
	fails(t.Context(), 20*time.Millisecond, os.ErrDeadlineExceeded)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errEvicted)
	fails(ctx, patience, errEvicted)
	result := make(chan error, 1)
	go func() {
		conn, err := dialTCP(t.Context(), "", to, patience)
		if err == nil {
			_, err = conn.Write([]byte("x"))
			err = errors.Join(err, conn.Close())
		}
		result <- err
	}()
	poll.Until(t, "the handshake waits for room", func() bool {
		sockets, err := os.ReadFile("/proc/thread-self/net/tcp")
		return err == nil && strings.Contains(string(sockets), fmt.Sprintf(":%04X 02 ", to.Port())) // TCP_SYN_SENT
	})
	for range filled + 1 { // those that fill the queue make room
		accepted, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(accepted)
	}
	if err := <-result; err != nil {
		t.Errorf("after there was room: got %v, want a connection that works", err)
	}
}

// Where nobody listens, the system may give a client the very port that it dials. The
// connection, with itself, is an endpoint that does not answer.
func TestNobodyIsConnectedWithItself(t *testing.T) {
	ns := netnstest.New(t)
	if err := ns.SetSysctl("net/ipv4/ip_local_port_range", "40000 40000"); err != nil {
		t.Fatal(err)
	}
	for _, at := range []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:40000"), netip.MustParseAddrPort("[::1]:40000")} {
		var conn net.Conn
		var dialed error
		err := ns.Do(func() error {
			conn, dialed = dialTCP(t.Context(), "", at, patience)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if !errors.Is(dialed, unix.ECONNREFUSED) {
			t.Errorf("dial %v: got %v, %v, want that it is refused", at, conn, dialed)
		}
	}
}
