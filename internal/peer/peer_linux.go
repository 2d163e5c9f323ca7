package peer

import (
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// IsTrusted reports whether the other end of a unix socket is a process of root or of the
// process's own user.
func IsTrusted(conn net.Conn) bool {
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return false
	}
	trusted := false
	err = raw.Control(func(fd uintptr) {
		peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		trusted = err == nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid())
	})
	return err == nil && trusted
}
