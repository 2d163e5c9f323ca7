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

// copyAll copies one direction to its end, and says how much that was. Between two
// TCP sockets, what comes in small pieces goes through a buffer, which takes the
// fewest system calls, and what comes in large ones the kernel splices. Buffers and
// pipes are borrowed when there is something to pass on: they are not tied up, nor
// two descriptors for each direction of each connection, while nobody says anything.
func copyAll(to, from net.Conn, buffers *sync.Pool, l *lease) (total int64, err error) {
	_, toTCP := to.(*net.TCPConn)
	fromTCP, ok := from.(*net.TCPConn)
	if !toTCP || !ok {
		return io.Copy(to, heard{from, l})
	}
	raw, err := fromTCP.SyscallConn()
	if err != nil {
		return 0, err
	}
	d := &direction{to: to, from: from, raw: raw, buffers: buffers, lease: l}
	for {
		n, err := d.piece()
		if total += n; err != nil || n == 0 {
			return total, err
		}
		for n >= passBuffer && err == nil {
			n, err = d.splice()
			total += n
		}
		if err != nil {
			return total, err
		}
	}
}

// direction is one of a TCP connection.
type direction struct {
	to, from net.Conn
	raw      syscall.RawConn // of from
	buffers  *sync.Pool      // of *[passBuffer]byte
	lease    *lease

	// What attempt has read.
	buffer  *[passBuffer]byte
	n       int
	failure error
}

// piece waits until there is something, and passes on as much as a buffer holds; 0 is
// the end.
func (d *direction) piece() (n int64, err error) {
	err = d.raw.Read(d.attempt)
	if d.buffer == nil {
		return 0, err
	}
	defer d.giveBack()
	if err = errors.Join(err, d.failure); err != nil || d.n == 0 {
		return 0, err
	}
	d.lease.touch()
	written, err := d.to.Write(d.buffer[:d.n])
	return int64(written), err
}

// attempt reads if there is something to read.
func (d *direction) attempt(fd uintptr) (done bool) {
	d.buffer, _ = d.buffers.Get().(*[passBuffer]byte)
	for {
		d.n, d.failure = unix.Read(int(fd), d.buffer[:])
		switch {
		case errors.Is(d.failure, unix.EINTR):
			continue
		case errors.Is(d.failure, unix.EAGAIN):
			d.giveBack()
			return false
		default:
			d.failure = os.NewSyscallError("read", d.failure)
			return true
		}
	}
}

func (d *direction) giveBack() {
	d.buffers.Put(d.buffer)
	d.buffer = nil
}

// splice lets the kernel pass on what has arrived, by a pipe that io.CopyN borrows.
// It does nothing, and does not wait, if that is less than a buffer holds, or if the
// budget has no pipe left.
func (d *direction) splice() (n int64, err error) {
	var arrived int
	var failure error
	err = d.raw.Control(func(fd uintptr) { arrived, failure = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	if err = errors.Join(err, failure); err != nil || arrived < passBuffer {
		return 0, err
	}
	if !d.lease.budget.borrowPipe() {
		return 0, nil
	}
	defer d.lease.budget.returnPipe()
	d.lease.touch()
	return io.CopyN(d.to, d.from, int64(arrived))
}
