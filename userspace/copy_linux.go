package userspace

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// copyAll copies one direction to its end, and returns the number of bytes. Between two
// TCP sockets it copies small pieces through a buffer, which takes the fewest system
// calls, and lets the kernel splice large ones. It takes a buffer or a pipe only while
// there is data: an idle connection uses neither memory nor the two descriptors of a
// pipe in each direction.
func copyAll(to passingWriter, from net.Conn, buffers *sync.Pool, l *lease) (total int64, err error) {
	_, toTCP := to.Conn.(*net.TCPConn)
	fromTCP, ok := from.(*net.TCPConn)
	if !toTCP || !ok {
		return io.Copy(to, activityReader{from, l})
	}
	raw, err := fromTCP.SyscallConn()
	if err != nil {
		return 0, err
	}
	d := &direction{to: to, from: from, raw: raw, buffers: buffers, lease: l}
	for {
		n, err := d.copyChunk()
		if total += n; err != nil || n == 0 {
			return total, err
		}
		for n >= copyBufferSize && err == nil {
			n, err = d.splice()
			total += n
		}
		if err != nil {
			return total, err
		}
	}
}

// direction is one direction of a TCP connection.
type direction struct {
	to      passingWriter
	from    net.Conn
	raw     syscall.RawConn // of from
	buffers *sync.Pool      // of *[copyBufferSize]byte
	lease   *lease

	// The result of tryRead.
	buffer  *[copyBufferSize]byte
	n       int
	failure error
}

// copyChunk waits for data and copies at most one buffer of it; n is 0 at the end.
func (d *direction) copyChunk() (n int64, err error) {
	err = d.raw.Read(d.tryRead)
	if d.buffer == nil {
		return 0, err
	}
	defer d.putBuffer()
	if err = errors.Join(err, d.failure); err != nil || d.n == 0 {
		return 0, err
	}
	d.lease.touch()
	written, err := d.to.Write(d.buffer[:d.n])
	return int64(written), err
}

// tryRead reads into a buffer; done is false if there is no data yet.
func (d *direction) tryRead(fd uintptr) (done bool) {
	d.buffer, _ = d.buffers.Get().(*[copyBufferSize]byte)
	for {
		d.n, d.failure = unix.Read(int(fd), d.buffer[:])
		switch {
		case errors.Is(d.failure, unix.EINTR):
			continue
		case errors.Is(d.failure, unix.EAGAIN):
			d.putBuffer()
			return false
		default:
			d.failure = os.NewSyscallError("read", d.failure)
			return true
		}
	}
}

func (d *direction) putBuffer() {
	d.buffers.Put(d.buffer)
	d.buffer = nil
}

// splice lets the kernel copy the data that has arrived, through a pipe of io.CopyN. It
// returns 0 without waiting if that is less than a buffer holds, or if the budget has
// no pipe left.
func (d *direction) splice() (n int64, err error) {
	var arrived int
	var failure error
	err = d.raw.Control(func(fd uintptr) { arrived, failure = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	if err = errors.Join(err, failure); err != nil || arrived < copyBufferSize {
		return 0, err
	}
	if !d.lease.budget.acquirePipe() {
		return 0, nil
	}
	defer d.lease.budget.releasePipe()
	d.lease.touch()
	n, err = io.CopyN(d.to.Conn, d.from, int64(arrived))
	d.to.passed(n)
	return n, err
}
