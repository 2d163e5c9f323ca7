//go:build unix

package userspace

import (
	"os"
	"syscall"
)

// processLimit is how many descriptors this process may have. Go has raised the soft
// limit to the hard one when it started.
func processLimit() int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return mostDescriptors
	}
	return int(min(uint64(limit.Cur), mostDescriptors)) //nolint:unconvert // FreeBSD has an int64
}

// openDescriptors counts those that are open.
func openDescriptors() int {
	entries, err := os.ReadDir("/dev/fd")
	if err != nil {
		return unknownOpen
	}
	return len(entries)
}
