package localhost

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// bindToLoopback lets a socket at 127.0.0.1 receive packets from the interface lo only, whose
// name is the same in every network namespace. At ::1 the kernel drops those from other
// interfaces (RFC 4291, 2.5.3), and a bound socket could not answer clients of the node that
// have another source address than ::1.
func bindToLoopback(network, _ string, c syscall.RawConn) error {
	if strings.HasSuffix(network, "6") {
		return nil
	}
	var bindErr error
	err := c.Control(func(fd uintptr) { bindErr = unix.BindToDevice(int(fd), "lo") })
	if err = errors.Join(err, bindErr); err != nil {
		return fmt.Errorf("bind socket to interface lo: %w", err)
	}
	return nil
}
