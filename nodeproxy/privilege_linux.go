package nodeproxy

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// checkPrivilege fails early without CAP_NET_ADMIN. Otherwise every sync would fail.
func checkPrivilege() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // of 32 capabilities each
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	if sets[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return errors.New("capability CAP_NET_ADMIN is missing: run nodeproxy as root, or grant it")
	}
	return nil
}
