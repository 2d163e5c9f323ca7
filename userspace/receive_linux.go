package userspace

import (
	"errors"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// receiver reads the datagrams of an endpoint. It takes a buffer only while there is a
// datagram to read: idle clients use no memory for datagrams.
type receiver struct {
	conn    net.Conn
	raw     syscall.RawConn // nil if conn is no *net.UDPConn
	buffers *sync.Pool      // of *[maxDatagram]byte
}

func newReceiver(conn net.Conn, buffers *sync.Pool) *receiver {
	r := &receiver{conn: conn, buffers: buffers}
	if udp, ok := conn.(*net.UDPConn); ok {
		r.raw, _ = udp.SyscallConn() // if that fails, next reads from conn
	}
	return r
}

// next waits for a datagram and passes it to handle.
func (r *receiver) next(handle func(datagram []byte)) error {
	if r.raw == nil {
		buffer, _ := r.buffers.Get().(*[maxDatagram]byte)
		defer r.buffers.Put(buffer)
		n, err := r.conn.Read(buffer[:])
		if err == nil {
			handle(buffer[:n])
		}
		return err
	}
	var failure error
	err := r.raw.Read(func(fd uintptr) (done bool) {
		buffer, _ := r.buffers.Get().(*[maxDatagram]byte)
		defer r.buffers.Put(buffer)
		n, err := unix.Read(int(fd), buffer[:])
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			return false
		}
		if failure = err; err == nil {
			handle(buffer[:n])
		}
		return true
	})
	return errors.Join(err, failure)
}
