//go:build !linux

package userspace

import (
	"net"
	"sync"
)

// receiver reads the datagrams of an endpoint.
type receiver struct {
	conn    net.Conn
	buffers *sync.Pool // of *[maxDatagram]byte
}

func newReceiver(conn net.Conn, buffers *sync.Pool) *receiver { return &receiver{conn, buffers} }

// next waits for a datagram and passes it to handle.
func (r *receiver) next(handle func(datagram []byte)) error {
	buffer, _ := r.buffers.Get().(*[maxDatagram]byte)
	defer r.buffers.Put(buffer)
	n, err := r.conn.Read(buffer[:])
	if err == nil {
		handle(buffer[:n])
	}
	return err
}
