package neterror_test

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/serviceplane/serviceplane/internal/neterror"
)

// TestKinds: an error has one kind at most, whichever system's number it is, and however it is wrapped.
func TestKinds(t *testing.T) {
	t.Parallel()
	kinds := []neterror.Kind{
		neterror.Refused, neterror.Reset, neterror.InUse, neterror.NotAvailable, neterror.NoDescriptors, neterror.NoMemory,
	}
	numbers := map[syscall.Errno]neterror.Kind{
		syscall.ECONNREFUSED: neterror.Refused, 10061: neterror.Refused,
		syscall.ECONNRESET: neterror.Reset, 10054: neterror.Reset,
		syscall.EADDRINUSE: neterror.InUse, 10048: neterror.InUse, 10013: neterror.InUse,
		syscall.EADDRNOTAVAIL: neterror.NotAvailable, 10049: neterror.NotAvailable,
		syscall.EMFILE: neterror.NoDescriptors, syscall.ENFILE: neterror.NoDescriptors, 10024: neterror.NoDescriptors,
		syscall.ENOBUFS: neterror.NoMemory, syscall.ENOMEM: neterror.NoMemory, 10055: neterror.NoMemory,
	}
	for number, want := range numbers {
		err := &net.OpError{Op: "read", Err: os.NewSyscallError("read", number)}
		for _, kind := range kinds {
			if kind.Is(err) != (kind == want) {
				t.Errorf("%v (%d) is of kind %d: %v", number, int(number), kind, kind.Is(err))
			}
		}
	}
	for _, kind := range kinds {
		for _, err := range []error{nil, io.EOF, syscall.EINVAL, errors.New("refused")} {
			if kind.Is(err) {
				t.Errorf("%v is of kind %d", err, kind)
			}
		}
	}
}

// TestThisSystem: real sockets of this system return errors of these kinds.
func TestThisSystem(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, err = net.Listen("tcp", l.Addr().String())
	if !neterror.InUse.Is(err) {
		t.Errorf("a port that is in use: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for range 3 { // another program may have got the port
		var conn net.Conn
		if conn, err = net.Dial("tcp", l.Addr().String()); neterror.Refused.Is(err) {
			break
		} else if err == nil {
			_ = conn.Close()
		}
	}
	if !neterror.Refused.Is(err) {
		t.Errorf("a port where nobody listens: %v", err)
	}
	if _, err := net.Listen("tcp", "192.0.2.1:0"); err != nil && !neterror.NotAvailable.Is(err) { // sysctl ip_nonlocal_bind allows it
		t.Errorf("an address that this system does not have: %v", err)
	}
}
