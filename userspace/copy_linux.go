package userspace

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
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
	socket, toTCP := tcp(to.Conn)
	sender, fromTCP := tcp(from)
	if !toTCP || !fromTCP {
		return io.Copy(to, activityReader{from, l})
	}
	raw, err := sender.SyscallConn()
	if err != nil {
		return 0, err
	}
	d := &direction{to: to, socket: socket, raw: raw, buffers: buffers, lease: l}
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
	socket  syscall.Conn    // of to
	raw     syscall.RawConn // of the sender
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

// splice lets the kernel copy the data that has arrived, through a pipe. It returns 0
// without waiting if that is less than a buffer holds, or if there is no pipe.
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
	to, err := d.socket.SyscallConn()
	p := d.lease.budget.takePipe()
	if err != nil || p == nil {
		return 0, err
	}
	d.lease.touch()
	err = d.raw.Control(func(fd uintptr) { n, failure = move(int(fd), p.write, arrived) })
	if errors.Is(failure, unix.EAGAIN) { // urgent data is next
		return 0, nil
	}
	if err = errors.Join(err, failure); err != nil {
		return 0, err
	}
	for left := n; left > 0; {
		var moved int64
		err = to.Write(func(fd uintptr) (done bool) {
			moved, failure = move(p.read, int(fd), int(left))
			return !errors.Is(failure, unix.EAGAIN)
		})
		if err = errors.Join(err, failure); err != nil {
			return n - left, err // the pipe is not empty: it is not used again
		}
		left -= moved
		d.to.passed(moved)
	}
	d.lease.budget.idlePipes.Put(p)
	return n, nil
}

// move moves at most n bytes from or to a pipe, without waiting.
func move(from, to, n int) (int64, error) {
	for {
		moved, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if !errors.Is(err, unix.EINTR) {
			return max(moved, 0), os.NewSyscallError("splice", err)
		}
	}
}

// pipe is a pipe for splice(2). It is closed when nobody has used it for some time, by the
// garbage collector.
type pipe struct{ read, write int }

// pipeSize is the size of pipes, in bytes: what users without privileges may have
// (fs.pipe-max-size).
const pipeSize = 1 << 20

// takePipe returns an empty pipe; nil if the process has no descriptors left. The caller puts
// it into idlePipes if it is empty again.
func (b *Budget) takePipe() *pipe {
	if p, ok := b.idlePipes.Get().(*pipe); ok {
		return p
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return nil
	}
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pipeSize) // a smaller one works too
	p := &pipe{read: fds[0], write: fds[1]}
	runtime.AddCleanup(p, func(fds [2]int) {
		_ = unix.Close(fds[0])
		_ = unix.Close(fds[1])
	}, fds)
	return p
}

// next waits for a datagram and passes it to handle. It takes a buffer only while there is a
// datagram to read: idle clients use no memory for datagrams.
func (r *receiver) next(handle func(datagram []byte)) error {
	if r.raw == nil {
		return r.pass(r.conn.Read, handle)
	}
	var failure error
	err := r.raw.Read(func(fd uintptr) (done bool) {
		failure = r.pass(func(buffer []byte) (int, error) { return unix.Read(int(fd), buffer) }, handle)
		if errors.Is(failure, unix.EAGAIN) || errors.Is(failure, unix.EINTR) {
			failure = nil
			return false
		}
		return true
	})
	return errors.Join(err, failure)
}
