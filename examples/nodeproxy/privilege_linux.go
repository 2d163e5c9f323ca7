package main

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// checkPrivilege says what is missing before anything is tried: later it would be
// one failed sync after another.
func checkPrivilege() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // of 32 capabilities each
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("look up own capabilities: %w", err)
	}
	if sets[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return errors.New("lacking the capability CAP_NET_ADMIN, which programming the kernel takes: run it as root")
	}
	return nil
}
