//go:build !linux

package localhost

import "syscall"

// bindToLoopback does nothing: other systems do not route packets from the network to
// loopback addresses.
func bindToLoopback(_, _ string, _ syscall.RawConn) error { return nil }
