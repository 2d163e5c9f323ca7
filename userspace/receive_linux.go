package userspace

import (
	"errors"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// receiver reads the datagrams of an endpoint. It borrows a buffer when there is one
// to read: clients that are quiet cost no memory for datagrams.
type receiver struct {
	conn    net.Conn
	raw     syscall.RawConn // nil for a socket of somebody else's making
	buffers *sync.Pool      // of *[maxDatagram]byte
}

func newReceiver(conn net.Conn, buffers *sync.Pool) *receiver {
	r := &receiver{conn: conn, buffers: buffers}
	if udp, ok := conn.(*net.UDPConn); ok {
		r.raw, _ = udp.SyscallConn() // without it, like the others
	}
	return r
}

// next waits for a datagram and hands it to take.
func (r *receiver) next(take func(datagram []byte)) error {
	if r.raw == nil {
		buffer, _ := r.buffers.Get().(*[maxDatagram]byte)
		defer r.buffers.Put(buffer)
		n, err := r.conn.Read(buffer[:])
		if err == nil {
			take(buffer[:n])
		}
		return err
	}
	var failure error
	err := r.raw.Read(func(fd uintptr) (done bool) {
		buffer, _ := r.buffers.Get().(*[maxDatagram]byte)
		defer r.buffers.Put(buffer)
		n, _, err := unix.Recvfrom(int(fd), buffer[:], unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			return false
		}
		if failure = err; err == nil {
			take(buffer[:n])
		}
		return true
	})
	return errors.Join(err, failure)
}
