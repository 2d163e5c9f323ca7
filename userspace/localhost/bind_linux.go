package localhost

import (
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// bindToLoopback lets a socket receive packets from the interface lo only, whose name is the
// same in every network namespace.
func bindToLoopback(_, _ string, c syscall.RawConn) error {
	var bindErr error
	err := c.Control(func(fd uintptr) { bindErr = unix.BindToDevice(int(fd), "lo") })
	if err = errors.Join(err, bindErr); err != nil {
		return fmt.Errorf("bind socket to interface lo: %w", err)
	}
	return nil
}
