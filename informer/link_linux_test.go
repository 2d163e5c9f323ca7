package informer

import (
	"net"
	"syscall"
	"testing"
)

// The kernel's keepalives notice within half a minute that a peer has vanished.
func TestAPeerThatVanishesIsNoticed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, _, config := linked("", LinkOptions{})
	conn, err := config.Dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	option := func(level, name int) (value int) {
		if control := raw.Control(func(fd uintptr) { value, err = syscall.GetsockoptInt(int(fd), level, name) }); control != nil || err != nil {
			t.Fatalf("getsockopt: %v, %v", control, err)
		}
		return value
	}
	on := option(syscall.SOL_SOCKET, syscall.SO_KEEPALIVE)
	idle, interval, count := option(syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE), option(syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL), option(syscall.IPPROTO_TCP, syscall.TCP_KEEPCNT)
	if on == 0 || idle+interval*count > 30 {
		t.Errorf("keepalive %d, after %ds each %ds %d times, want a peer to be given up within 30s", on, idle, interval, count)
	}
}
