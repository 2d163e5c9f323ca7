package nodeproxy

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ownSocket makes the process the owner of a socket's path, until release or its end. It fails with
// errListens while another process is. The lock is that of a file, which release removes.
func ownSocket(path string) (release func(), err error) {
	name := path + ".lock"
	for {
		file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock debug socket: %w", err)
		}
		if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = file.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, listens(path)
			}
			return nil, fmt.Errorf("lock debug socket: %w", err)
		}
		if isAt(file, name) {
			return func() {
				if isAt(file, name) { // while it is locked: who opens it later makes another one
					_ = os.Remove(name)
				}
				_ = file.Close()
			}, nil
		}
		_ = file.Close() // the owner before has removed it meanwhile
	}
}

// isAt reports whether a file is the one that has the name.
func isAt(file *os.File, name string) bool {
	have, err := file.Stat()
	if err != nil {
		return false
	}
	want, err := os.Lstat(name)
	return err == nil && os.SameFile(have, want)
}

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
