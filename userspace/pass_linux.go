package userspace

import (
	"errors"
	"io"
	"net"

	"golang.org/x/sys/unix"
)

// copyAll copies one direction to its end, and says how much that was. Between two TCP sockets the kernel splices
// what has arrived, by pipes that io.CopyN borrows: so they are not tied up, two
// descriptors for each direction of each connection, while nobody says anything.
func copyAll(to, from net.Conn) (total int64, err error) {
	_, toTCP := to.(*net.TCPConn)
	fromTCP, ok := from.(*net.TCPConn)
	if !toTCP || !ok {
		return io.Copy(to, from)
	}
	for {
		n, err := arrived(fromTCP)
		if err != nil || n == 0 {
			return total, err
		}
		n, err = io.CopyN(to, from, n)
		if total += n; err != nil {
			return total, err
		}
	}
}

// arrived waits until there is something to read, and says how many bytes that are;
// 0 is the end.
func arrived(conn *net.TCPConn) (n int64, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var failure error
	err = raw.Read(func(fd uintptr) (done bool) {
		waiting, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		if err != nil || waiting > 0 {
			n, failure = int64(waiting), err
			return true
		}
		_, _, err = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			return false
		}
		if failure = err; err == nil { // the end, unless something has come just now
			waiting, failure = unix.IoctlGetInt(int(fd), unix.TIOCINQ)
			n = int64(waiting)
		}
		return true
	})
	return n, errors.Join(err, failure)
}
